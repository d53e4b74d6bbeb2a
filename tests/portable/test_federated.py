"""Federated averaging of examples/federated: ten clients over HTTP, a killed server, vanished clients."""

import hashlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from artifact_sets import EXAMPLES, loaded
from portable_steps import batches, client

from opgrad.training.export import export_step

FOLDER = EXAMPLES / "federated"
TOKEN, CLIENTS, ROUNDS, WAIT = "secret", 10, 5, 120


def module(name):
    return loaded(FOLDER / f"{name}.py")


class Server:
    """The server in a process of its own, which can be killed and started again."""

    def __init__(self, folder, seconds):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address, self.database = f"http://127.0.0.1:{self.port}", folder / "rounds.db"
        words = [folder / "step.json", self.database, "--token", TOKEN, "--port", self.port, "--seconds", seconds]
        self.command = [sys.executable, FOLDER / "server.py", *words, "--clients", CLIENTS]
        self.start()

    def start(self):
        self.process = subprocess.Popen([str(word) for word in self.command])

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def exported(tmp_path):
    export_step(EXAMPLES / "digits", tmp_path / "step.onnx", flat=True, models=["eval"], optimizer=None)
    return tmp_path


@pytest.fixture
def serve(exported):
    servers = []

    def made(seconds=30):
        servers.append(Server(exported, seconds))
        return servers[-1]

    yield made
    for server in servers:
        server.kill()


def taking_part(server, folder, shares):
    """Ten clients with rows of their own: eight threads, one of which vanishes soon, and two Node processes."""
    processes, threads = [], []
    for number, arrays in enumerate(shares):
        if number < 2:
            data = folder / f"rows{number}.json"
            data.write_text(json.dumps({name: array.tolist() for name, array in arrays.items()}))
            words = [server.address, folder / "step.json", data, f"node-{number}", TOKEN, ROUNDS]
            processes.append(subprocess.Popen(["node", FOLDER / "client.mjs", *map(str, words)]))
        else:
            own = module("client").Client(server.address, folder / "step.json", arrays, f"python-{number}", TOKEN)
            rounds = 1 if number == 2 else ROUNDS
            threads.append(threading.Thread(target=own.run, args=(rounds,)))
            threads[-1].start()
    return processes, threads


def test_ten_clients_learn_what_none_could_alone(serve, exported):
    shares = list(batches("digits", CLIENTS, rows=100))
    test = next(batches("digits", 1, rows=400, seed=5))
    server = serve(seconds=6)
    processes, threads = taking_part(server, exported, shares)
    watching = module("client").Client(server.address, exported / "step.json", shares[0], "watch", TOKEN)
    while watching.number() < 2:
        threading.Event().wait(0.1)
    before = watching.ask("/rounds/2/parameters")[0]
    server.kill()
    server.start()
    assert watching.ask("/rounds/2/parameters")[0] == before
    for thread in threads:
        thread.join(WAIT)
    assert [process.wait(WAIT) for process in processes] == [0, 0]
    assert watching.number() == ROUNDS
    step = client().Step(exported / "step.json")
    first = step.evaluate(test)["accuracy"]
    step.state["parameters"] = np.frombuffer(watching.ask(f"/rounds/{ROUNDS}/parameters")[0], np.float32)
    assert first < 0.3 < 0.85 < step.evaluate(test)["accuracy"]
    with sqlite3.connect(server.database) as database:
        assert [row[0] for row in database.execute("SELECT number FROM rounds")] == list(range(ROUNDS + 1))


def put(server, content, path="/rounds/0/updates/me", token=TOKEN, samples="10", digest=None):
    headers = {"Authorization": f"Bearer {token}", "X-Samples": samples}
    headers["X-SHA256"] = digest or hashlib.sha256(content).hexdigest()
    request = urllib.request.Request(server.address + path, content, headers, method="PUT")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_updates_that_do_not_fit_are_refused(serve, exported):
    server = serve()
    own = module("client").Client(server.address, exported / "step.json", {"labels": np.zeros(1)}, "me", TOKEN)
    content, _ = own.ask("/rounds/0/parameters")
    nan = np.full(len(content) // 4, np.nan, np.float32).tobytes()
    for given, status, text in [
        ({"token": "other"}, 401, "expected the header Authorization"),
        ({"content": content[:-4]}, 400, f"bytes, expected {len(content)}"),
        ({"content": content * 2}, 413, ""),
        ({"content": nan}, 400, "numbers that are not finite"),
        ({"digest": "0"}, 400, "the update is damaged"),
        ({"samples": "0"}, 400, "expected 1 to"),
        ({"samples": "9" * 30}, 400, "expected 1 to"),
        ({"samples": "1".zfill(12) + "0" * 9}, 400, "expected 1 to"),
        ({"samples": "1000001"}, 400, "expected 1 to"),
        ({"path": "/rounds/7/updates/me"}, 409, "round 7 is over, 0 is going on"),
        ({"path": "/rounds/0/updates/a%20b"}, 400, "the client's name"),
    ]:
        found, answer = put(server, **{"content": content, **given})
        assert (found, text in str(answer)) == (status, True), (given.keys(), found, answer)
    with pytest.raises(ValueError, match=r"refuses \(401\)"):
        module("client").Client(server.address, exported / "step.json", {"labels": np.zeros(1)}, "me", "x").number()
    assert put(server, content)[1]["clients"] == put(server, content)[1]["clients"] == 1  # sent again, counted once


def test_the_average_is_weighted_by_samples(tmp_path):
    rounds = module("server").Rounds(tmp_path / "rounds.db", np.zeros(3, np.float32).tobytes(), enough=2)
    rounds.add(0, "a", 30, np.array([1, 2, 3], np.float32).tobytes())
    assert rounds.progress() == {"round": 0, "clients": 1, "samples": 30}
    rounds.add(0, "b", 10, np.array([5, 6, -1], np.float32).tobytes())
    np.testing.assert_array_equal(np.frombuffer(rounds.parameters(1), np.float32), [2, 3, 2])
    rounds.database.close()
    with pytest.raises(ValueError, match="has the rounds of another model"):
        module("server").Rounds(tmp_path / "rounds.db", bytes(16))
