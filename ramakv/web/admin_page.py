"""The live page: its shell, which anybody may load, and its data, which takes the token."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from quart import Response, request
from quart_trio import QuartTrio

from ramakv import codec
from ramakv.errors import BadRequestError, NotFoundError
from ramakv.web.admin import Admin
from ramakv.web.gate import Gate
from ramakv.web.residency_view import look_at_residency

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_LANGUAGES: Final = ("en", "zh")
QUERY_CHARS_MAX: Final = 512


class _File(Struct, frozen=True):
    content: bytes
    type: str
    etag: str


def answer(data: Any, *, status: int = 200) -> Response:
    """Make a JSON response."""
    return Response(codec.encode(data), status=status, content_type="application/json")


def add_page(app: QuartTrio, admin: Admin, gate: Gate) -> None:
    """Add the page, and what it reads."""
    files = _load_files()

    @app.get("/")
    async def index() -> Response:
        """Serve the page, which picks its language from the browser's until it is told another."""
        language = request.accept_languages.best_match(_LANGUAGES) or _LANGUAGES[0]
        shell = files["index.html"]
        content = shell.content.replace(b'lang="en"', f'lang="{language}"'.encode(), 1)
        response = Response(content, content_type=shell.type)
        response.headers["Vary"] = "Accept-Language"
        return response

    @app.get("/static/<name>")
    async def static(name: str) -> Response:
        if (file := files.get(name)) is None:
            raise NotFoundError(f"no such file: {name[:100]}")
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if file.etag in request.if_none_match:
            return Response(b"", status=304, headers=headers)
        return Response(file.content, content_type=file.type, headers=headers)

    @app.get("/api/overview")
    async def overview() -> Response:
        gate.check_reading(request.scope["headers"])
        return answer(await admin.snapshot())

    @app.get("/api/stream")
    async def stream() -> Response:
        gate.check_reading(request.scope["headers"])
        admin.check_room()
        kind = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":  # a body without end, and nobody to read it
            return Response(b"", content_type=kind)
        response = Response(admin.stream(), content_type=kind)
        response.timeout = None
        return response

    @app.get("/api/session")
    async def session() -> Response:
        gate.check_reading(request.scope["headers"])
        return answer(await admin.views.session(_asked("id")))

    @app.get("/api/residency")
    async def residency() -> Response:
        gate.check_reading(request.scope["headers"])
        return answer(look_at_residency(admin.service))

    @app.get("/api/search")
    async def search() -> Response:
        gate.check_reading(request.scope["headers"])
        return answer(await admin.views.search(_asked("q")))


def _asked(name: str) -> str:
    text = request.args.get(name, "")
    if not text or len(text) > QUERY_CHARS_MAX:
        raise BadRequestError(
            f"expected ?{name}=…, of 1 to {QUERY_CHARS_MAX} characters, got {len(text)}"
        )
    return str(text)


def _load_files() -> dict[str, _File]:
    """Read all files once: they are few and small."""
    return {
        path.name: _File(content, _TYPES[path.suffix], sha256(content).hexdigest()[:16])
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
        for content in [path.read_bytes()]
    }
