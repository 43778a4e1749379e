"""The page in a browser: it fits a phone, and follows the system color scheme.

Skips where neither Chromium nor Chrome is installed.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lmx.run.html.page import TEMPLATES, page
from sample_runs import make_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
]
PHONE, DESK, HEIGHT = 360, 1200, 5000
# Reports the width, and the number of elements that the Tab key reaches.
TELLER = """<script>
const stops = [...document.querySelectorAll('a, summary, [tabindex="0"]')]
const sizes = [document.documentElement.scrollWidth, innerWidth,
  stops.every(stop => stop.tabIndex === 0), document.title]
parent.postMessage(sizes.join(), '*')
</script>"""
STYLE = "<style>body {margin: 0; width: 9999px} iframe {border: 0; float: left}</style>"
LISTENER = """<script>
addEventListener('message', sizes => document.body.append(`[${sizes.data}]`))
</script>"""


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None and not MAC.exists():
        pytest.skip("no Chromium here")
    return program or str(MAC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page of a run, and a copy with an element that is too wide."""
    folder = tmp_path_factory.mktemp("screens")
    html = page(make_run(folder / "try"))
    html = re.sub(r"<meta http-equiv[^>]*>", "", html)
    (folder / "report.html").write_text(html + TELLER)
    wide = '<div style="width: 999px">too wide</div>'
    (folder / "wide.html").write_text(html + wide + TELLER)
    return folder


def run(browser, folder, frames, *flags):
    """The browser's output for pages side by side, of (name, width)."""
    inner = "".join(
        f'<iframe src="{name}.html" width={width} height={HEIGHT}></iframe>'
        for name, width in frames
    )
    outer = folder / "frames.html"
    outer.write_text(f"{STYLE}<body>{LISTENER}{inner}")
    width = sum(width for _, width in frames)
    return subprocess.run(
        [
            *(browser, *FLAGS, f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={width},{HEIGHT}", *flags, outer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def test_page_fits_the_screen_width(browser, folder):
    frames = [("report", PHONE), ("report", DESK), ("wide", PHONE)]
    html = run(browser, folder, frames, "--dump-dom")
    sizes = re.findall(r"\[(\d+),(\d+),(\w+),try: done\]", html)
    fits = [(str(width), str(width), "true") for width in (PHONE, DESK)]
    assert set(fits) < set(sizes)
    # An element that is too wide would change the sizes.
    [wide] = set(sizes) - set(fits)
    assert int(wide[0]) >= 999


@pytest.mark.parametrize(("scheme", "width"), [("light", DESK), ("dark", PHONE)])
def test_page_follows_the_system_color_scheme(browser, folder, scheme, width):
    from PIL import Image

    picture = folder / f"{scheme}.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    run(browser, folder, [("report", width)], f"--screenshot={picture}", *dark)
    # A browser window cannot be as narrow as a phone.
    image = Image.open(picture).convert("RGB").crop((0, 0, width, HEIGHT))
    colors = expected(scheme)
    assert image.getpixel((2, 2)) == colors["back"]
    counts = {color: count for count, color in image.getcolors(1 << 24)}
    for name, minimum in {"panel": 5000, "line-1": 300, "shade-2": 300}.items():
        assert counts.get(colors[name], 0) > minimum, name
    # Nothing else covers the page.
    assert counts[colors["back"]] + counts[colors["panel"]] > 0.7 * width * HEIGHT


def expected(scheme):
    light, _, dark = (TEMPLATES / "style.css").read_text().partition("@media (prefers")
    pairs = re.findall(r"--([\w-]+): #(\w{6})", dark if scheme == "dark" else light)
    return {name: tuple(bytes.fromhex(color)) for name, color in pairs}
