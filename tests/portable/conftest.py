"""Other runtimes and a browser: only where `make test-portable` has installed them."""

import os
import threading

import pytest
from artifact_sets import EXAMPLES, loaded

BROWSER = EXAMPLES / "browser"

if not os.environ.get("OPGRAD_PORTABLE"):
    collect_ignore_glob = ["test_*.py"]

# Without what a browser does on its own account.
ARGUMENTS = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
# WebGPU by a software adapter: slow, and the same way through the runtime.
WEBGPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Opens the system's Chromium with a folder of its own."""
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as running:

        def opened(folder=None, webgpu=False, **settings):
            folder = folder or tmp_path_factory.mktemp("profile")
            arguments = [*ARGUMENTS, *(WEBGPU if webgpu else ["--disable-gpu"])]
            return running.chromium.launch_persistent_context(
                folder, executable_path=executable, args=arguments, headless=True, **settings
            )

        yield opened


@pytest.fixture(scope="session")
def serving():
    """Serves folders as examples/browser/serve.py does; gives the address."""
    module = loaded(BROWSER / "serve.py")
    servers = {}

    def served(folder):
        running = module.server(folder)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        address = f"http://localhost:{running.server_address[1]}/"
        servers[address] = running
        return address

    def stop(address):
        running = servers.pop(address)
        running.shutdown()
        running.server_close()

    served.stop = stop
    yield served
    for address in list(servers):
        stop(address)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The page's folder."""
    folder = tmp_path_factory.mktemp("site")
    loaded(BROWSER / "build.py").build(folder, BROWSER / "node_modules")
    return folder
