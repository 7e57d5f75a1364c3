"""Who may ask: requests to this machine's own name, with the token, that only read.

A page of another site can make a browser send requests here. It has no token: the cookie is SameSite=Strict. The Host header
is checked because a name that resolves to this machine (DNS rebinding) would make that site ours.
"""

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-fullshard-token"
# Style elements that plotly makes as it is loaded: an empty one, whose rules it then adds by script, and that of its maps.
# Another version's maps have another hash: it is refused, with a line in the console, and only maps would miss it.
PLOTLY_STYLES = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
SAFE = {
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' {PLOTLY_STYLES}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Refuses with 403 what has no token or another host, and with 405 what would write. Adds headers to every answer."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str], port: int):
        self.app, self.token, self.hosts = app, token, hosts
        self.cookie = f"fullshard-{port}"  # cookies do not tell ports apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/" if self._in_query(scope) else None
        await (self._refusal(scope) or self.app)(scope, receive, _with_headers(send, cookie))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self.hosts:
            return PlainTextResponse("this page answers to its own address only", 403)
        if scope["path"] != "/" and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("this page answers to no other site", 403)
        if not any(self._is_token(given) for given in (headers.get(HEADER), self._in_cookie(headers), self._in_query(scope))):
            return PlainTextResponse("the token is missing or wrong; open the address that `fullshard page` printed", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", 405)
        return None

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self.token.encode())

    def _in_cookie(self, headers: Headers) -> str | None:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return morsel.value if morsel else None

    def _in_query(self, scope: Scope) -> str | None:
        """The token in the address; of the page alone, not of what it asks for later."""
        query = parse_qs(scope["query_string"].decode("latin-1")) if scope["path"] == "/" else {}
        return query.get("token", [None])[0]


def _with_headers(send: Send, cookie: str | None) -> Send:
    """Sends with the headers of every answer. `cookie`: keeps the token of the printed address, if the answer is no refusal."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in SAFE.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
            if cookie and message["status"] == 200:
                headers.append("set-cookie", cookie)
        await send(message)

    return sent
