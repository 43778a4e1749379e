"""The page in a browser: it fits a phone, and is drawn in the colours of the system.

Skips where neither Chromium nor Chrome is installed.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import make_run

from toolkit.run.page.write import TEMPLATES, page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
]
PHONE, DESK, HEIGHT = 360, 1200, 5000
# Tells the page around it how wide it is, and how many things the Tab key reaches.
TELLER = """<script>
const stops = [...document.querySelectorAll('a, summary, [tabindex="0"]')]
const told = [document.documentElement.scrollWidth, innerWidth,
  stops.every(stop => stop.tabIndex === 0), document.title]
parent.postMessage(told.join(), '*')
</script>"""
LISTENER = """<script>
addEventListener('message', told => document.body.append(`[${told.data}]`))
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not MAC.exists():
        pytest.skip("no Chromium here")
    return found or str(MAC)


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """A page that holds the report as wide as on a phone and as on a desk."""
    folder = tmp_path_factory.mktemp("frames")
    html = page(make_run(folder / "try"))
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", html)
    (folder / "report.html").write_text(without_policy + TELLER)
    wide = '<div style="width: 999px">too wide</div>'
    (folder / "wide.html").write_text(without_policy + wide + TELLER)
    inner = "".join(
        f'<iframe src="{name}.html" width={width} height={HEIGHT}></iframe>'
        for name, width in (("report", PHONE), ("report", DESK), ("wide", PHONE))
    )
    style = (
        "<style>body {margin: 0; width: 9999px} iframe {border: 0; float: left}</style>"
    )
    (folder / "frames.html").write_text(f"{style}<body>{LISTENER}{inner}")
    return folder / "frames.html"


def run(browser, page, *flags):
    """What the browser prints about a page."""
    return subprocess.run(
        [
            *(browser, *FLAGS, f"--user-data-dir={page.parent / 'profile'}"),
            *(f"--window-size={PHONE + DESK},{HEIGHT}", *flags, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def test_nothing_is_wider_than_the_screen(browser, frames):
    html = run(browser, frames, "--dump-dom")
    told = re.findall(r"\[(\d+),(\d+),(\w+),try: done\]", html)
    fits = [("1200", "1200", "true"), ("360", "360", "true")]
    assert set(fits) < set(told)
    # What is too wide would be told.
    [wide] = set(told) - set(fits)
    assert int(wide[0]) >= 999


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_the_colours_of_the_system(browser, frames, tmp_path, scheme):
    from PIL import Image

    picture = tmp_path / "screen.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    run(browser, frames, f"--screenshot={picture}", *dark)
    image = Image.open(picture).convert("RGB")
    assert image.size == (PHONE + DESK, HEIGHT)
    colours = expected(scheme)
    for left, right in ((0, PHONE), (PHONE, PHONE + DESK)):
        part = image.crop((left, 0, right, HEIGHT))
        assert part.getpixel((2, 2)) == colours["back"]
        seen = {colour: count for count, colour in part.getcolors(1 << 24)}
        for name, least in {"panel": 5000, "line-1": 300, "shade-2": 300}.items():
            assert seen.get(colours[name], 0) > least, name
        # Text, smoothed at its edges, and nothing that covers the page.
        assert (
            seen[colours["back"]] + seen[colours["panel"]] > 0.7 * part.size[0] * HEIGHT
        )


def expected(scheme):
    light, _, rest = (TEMPLATES / "style.css").read_text().partition("@media (prefers")
    pairs = re.findall(r"--([\w-]+): #(\w{6})", rest if scheme == "dark" else light)
    return {name: tuple(bytes.fromhex(colour)) for name, colour in pairs}
