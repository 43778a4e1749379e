"""The web page of the server: page.html and what a browser lets it do."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

POLICY = {
    "default-src": "'none'",
    "connect-src": "'self'",
    "img-src": "data:",
    "style-src": "'unsafe-inline'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def page_response() -> Response:
    """The page, which may run its own script only and talk to this server only."""
    page, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[bytes, str]:
    """The page and its policy, which names the script by its hash: text that becomes
    part of the page by mistake does not run."""
    page = files(__package__).joinpath("page.html").read_bytes()
    hashes = [hashlib.sha256(text).digest() for text in SCRIPT.findall(page)]
    scripts = [f"'sha256-{base64.b64encode(value).decode()}'" for value in hashes]
    policy = POLICY | {"script-src": " ".join(scripts)}
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())
