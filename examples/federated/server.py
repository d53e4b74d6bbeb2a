"""A server of federated averaging: python server.py step.json rounds.db --token SECRET [--port 8080]

It hands out the flat parameters of a round, takes the parameters that clients have trained on their own data with the
count of these, and averages them, weighted by the counts (FedAvg, McMahan et al., arXiv 1602.05629). A round ends when
enough clients have answered, or after its time with at least one; who has vanished is not waited for. All is in SQLite
before it is answered, so that a server that is killed goes on where it was.

    GET  /round                        {"round", "samples", "clients", "manifest": SHA-256 of the manifest}
    GET  /rounds/N/parameters          bytes, with X-SHA256
    PUT  /rounds/N/updates/CLIENT      bytes, with X-Samples and X-SHA256; 200 also if it is sent again

Every request has "Authorization: Bearer SECRET".
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from aiohttp import web

CLIENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_SAMPLES = 1_000_000  # of one client: none shall outweigh the others
ENOUGH, SECONDS = 10, 30.0  # clients of a round, and its time


def digest(content):
    return hashlib.sha256(content).hexdigest()


def say(text):
    print(text, flush=True)


class Rounds:
    """The rounds in a database. initial: the parameters of round 0, bytes of float32."""

    def __init__(self, path, initial, enough=ENOUGH, seconds=SECONDS):
        self.size, self.enough, self.seconds = len(initial), enough, seconds
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode=WAL")
        self.database.execute("PRAGMA synchronous=FULL")
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS rounds (number INTEGER PRIMARY KEY, parameters BLOB, began REAL)"
        )
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS updates (round INTEGER, client TEXT, samples INTEGER, parameters BLOB, "
            "PRIMARY KEY (round, client))"
        )
        if self.number() is None:
            self.database.execute("INSERT INTO rounds VALUES (0, ?, ?)", (initial, time.time()))
        elif len(self.parameters(self.number())) != self.size:
            raise ValueError(f"{path} has the rounds of another model")

    def number(self):
        """The round that is going on."""
        return self.database.execute("SELECT max(number) FROM rounds").fetchone()[0]

    def parameters(self, number):
        """The parameters that a round begins with; None if there is none."""
        found = self.database.execute("SELECT parameters FROM rounds WHERE number = ?", (number,)).fetchone()
        return found and found[0]

    def progress(self):
        """The round that is going on, its clients and samples so far."""
        number = self.number()
        found = self.database.execute(
            "SELECT count(*), total(samples) FROM updates WHERE round = ?", (number,)
        ).fetchone()
        return {"round": number, "clients": found[0], "samples": int(found[1])}

    def add(self, number, client, samples, parameters):
        """Keep an update, once for each client; it ends the round if there are enough."""
        row = (number, client, samples, parameters)
        if self.database.execute("INSERT OR IGNORE INTO updates VALUES (?, ?, ?, ?)", row).rowcount:
            say(f"round {number}: {client} has trained on {samples:,} rows and sent {len(parameters):,} bytes")
        self.finish()

    def finish(self):
        """Average what there is if the round has enough clients, or its time is over."""
        number = self.number()
        (began,) = self.database.execute("SELECT began FROM rounds WHERE number = ?", (number,)).fetchone()
        late = time.time() - began >= self.seconds
        clients = self.progress()["clients"]
        if clients < (1 if late else self.enough):
            return
        average, total = np.zeros(self.size // 4), 0
        rows = self.database.execute(
            "SELECT samples, parameters FROM updates WHERE round = ? ORDER BY client", (number,)
        )
        for samples, content in rows:
            average += samples * np.frombuffer(content, "<f4").astype(np.float64)
            total += samples
        new = (average / total).astype("<f4").tobytes()
        self.database.execute("BEGIN IMMEDIATE")  # the next round is there, and this one's updates are not, or neither
        self.database.execute("INSERT INTO rounds VALUES (?, ?, ?)", (number + 1, new, time.time()))
        self.database.execute("DELETE FROM updates WHERE round <= ?", (number,))
        self.database.execute("COMMIT")
        told = f"{clients} clients, {total:,} rows, {clients * self.size:,} bytes came in"
        say(f"round {number} is over after {time.time() - began:.1f} s{' (its time)' * late}: {told}")


def refused(status, text):
    return web.json_response({"error": text}, status=status)


def checked(rounds, request, content):
    """What is wrong with an update, as an answer; None if nothing is."""
    samples = request.headers.get("X-Samples", "")
    if not CLIENT.fullmatch(request.match_info["client"]):
        return refused(400, "the client's name is no word of at most 64 letters")
    if not re.fullmatch("[0-9]{1,12}", samples) or not 0 < int(samples) <= MOST_SAMPLES:
        return refused(400, f"X-Samples is {samples[:20]!r}, expected 1 to {MOST_SAMPLES}")
    if len(content) != rounds.size:
        return refused(400, f"the update has {len(content)} bytes, expected {rounds.size}")
    if digest(content) != request.headers.get("X-SHA256"):
        return refused(400, "the update is damaged: its SHA-256 is not that of X-SHA256")
    if not np.isfinite(np.frombuffer(content, "<f4")).all():
        return refused(400, "the update has numbers that are not finite")
    return None


def application(rounds, token, manifest=b""):
    """The server's application."""

    @web.middleware
    async def authorized(request, handler):
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return refused(401, "expected the header Authorization: Bearer TOKEN, with the server's token")
        return await handler(request)

    async def state(request):
        rounds.finish()
        return web.json_response({**rounds.progress(), "manifest": digest(manifest)})

    async def parameters(request):
        content = rounds.parameters(int(request.match_info["number"]))
        if content is None:
            return refused(404, "there is no such round")
        return web.Response(body=content, headers={"X-SHA256": digest(content)})

    async def update(request):
        content = await request.read()
        wrong = checked(rounds, request, content)
        if wrong is not None:
            return wrong
        number = int(request.match_info["number"])
        if number != rounds.number():
            return refused(409, f"round {number} is over, {rounds.number()} is going on")
        rounds.add(number, request.match_info["client"], int(request.headers["X-Samples"]), content)
        return web.json_response(rounds.progress())

    app = web.Application(middlewares=[authorized], client_max_size=rounds.size + 1024)
    app.router.add_get("/round", state)
    app.router.add_get(r"/rounds/{number:\d{1,9}}/parameters", parameters)
    app.router.add_put(r"/rounds/{number:\d{1,9}}/updates/{client}", update)
    app.cleanup_ctx.append(lambda _: ending(rounds))
    return app


async def ending(rounds):
    """End rounds whose time is over, whether or not anybody asks."""

    async def watch():
        while True:
            await asyncio.sleep(min(1.0, rounds.seconds / 4))
            rounds.finish()

    task = asyncio.create_task(watch())
    yield
    task.cancel()


def initial_parameters(manifest):
    """The parameters of an export, which must be flat and in float32."""
    told = json.loads(Path(manifest).read_text())
    first = told["state"][0]
    if first["bytes"] != told["weights"]["bytes"]:
        raise ValueError(f"{manifest}: the step is not flat, expected `opgrad step --flat`")
    if first["dtype"] != "float32":
        raise ValueError(f"{manifest}: parameters are {first['dtype']}, expected float32")
    content = Path(manifest).with_name(told["files"]["weights"]["name"]).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return content[start : start + first["bytes"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("database", type=Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--clients", type=int, default=ENOUGH, help="that end a round")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a round ends without them")
    given = parser.parse_args()
    rounds = Rounds(given.database, initial_parameters(given.manifest), given.clients, given.seconds)
    with closing(rounds.database):
        app = application(rounds, given.token, given.manifest.read_bytes())
        say(f"listening on http://127.0.0.1:{given.port}: round {rounds.number()}, {rounds.size:,} bytes of parameters")
        say(f"a round ends with {rounds.enough} clients, or after {rounds.seconds:g} s with at least one")
        web.run_app(app, host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
