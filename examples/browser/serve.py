"""Serve the page on this machine: python serve.py [SITE] [PORT]. Any server that sends these headers will do."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {".mjs": "text/javascript", ".wasm": "application/wasm"}


class Handler(SimpleHTTPRequestHandler):
    """Files with their types, and what the browser may do with them."""

    def guess_type(self, path):
        """The type of a file, which some systems do not know."""
        return TYPES.get(Path(path).suffix) or super().guess_type(path)

    def end_headers(self):
        """Add the headers that every answer has."""
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *arguments):
        """Say nothing of requests."""


def server(site, port=0):
    """A server of a folder on this machine alone; port 0: any."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(site)))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "site"
    running = server(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
    print(f"http://localhost:{running.server_address[1]}/")
    running.serve_forever()
