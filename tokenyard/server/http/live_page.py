"""`GET /`: the live page. Its files are open to all, as they hold nothing; what it shows comes from `/v1/live`."""

from fastapi import APIRouter, Request, Response

from tokenyard.ui.files import HEADERS, SERVER_PAGE, read_file

router = APIRouter(include_in_schema=False)


async def _file(request: Request) -> Response:
    """A file of the page."""
    name, content_type = SERVER_PAGE[request.url.path]
    return Response(read_file(name), headers=HEADERS, media_type=content_type)


for _path in SERVER_PAGE:
    router.add_api_route(_path, _file, methods=["GET", "HEAD"])
