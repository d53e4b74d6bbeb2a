"""A client of server.py: python client.py URL step.json data.npz NAME --token SECRET [--rounds 5]

It takes the parameters of a round, trains on its own data, sends what they became and how many rows it has, and waits
for the next round. It needs onnxruntime and NumPy.
"""

import argparse
import hashlib
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "python"))
from step import Step

BATCH, RATE, EPOCHS, WAIT, TRIES = 20, 0.003, 2, 0.2, 100


class Client:
    """One client: its step, its rows, and the server's address."""

    def __init__(self, address, manifest, arrays, name, token):
        self.address, self.name, self.token = address.rstrip("/"), name, token
        self.step, self.arrays = Step(manifest), arrays
        self.rows = len(next(iter(arrays.values())))

    def ask(self, path, content=None, **headers):
        """The server's answer; a server that is away for a moment is asked again."""
        given = {"Authorization": f"Bearer {self.token}", **headers}
        request = urllib.request.Request(
            self.address + path, data=content, headers=given, method="GET" if content is None else "PUT"
        )
        for _ in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    raise ValueError(f"the server refuses ({error.code}): {json.load(error)['error']}") from None
            except OSError:
                time.sleep(WAIT)
        raise ConnectionError(f"no server at {self.address}")

    def say(self, text):
        print(f"{self.name}: {text}", flush=True)

    def number(self):
        """The round that is going on."""
        return json.loads(self.ask("/round")[0])["round"]

    def train(self, number):
        """Train on the parameters of a round; what they became."""
        content, headers = self.ask(f"/rounds/{number}/parameters")
        if hashlib.sha256(content).hexdigest() != headers["X-SHA256"]:
            raise ValueError("the parameters are damaged")
        self.step.load(self.step.read("weights"))  # fresh moments
        first = self.step.manifest["state"][0]
        self.step.state[first["input"]] = np.frombuffer(content, first["dtype"]).reshape(first["shape"])
        order, losses = np.random.default_rng(number), []
        for _ in range(EPOCHS):
            rows = order.permutation(self.rows)
            for start in range(0, self.rows, BATCH):
                picked = rows[start : start + BATCH]
                losses.append(self.step.train({name: array[picked] for name, array in self.arrays.items()}, RATE))
        self.say(f"round {number}: trained on {self.rows:,} rows {EPOCHS} times, mean loss {np.mean(losses):.3f}")
        return self.step.state[first["input"]].tobytes()

    def take_part(self, number):
        """Train in a round and send the update, unless the round is over by then."""
        self.say(f"round {number}: taking the parameters")
        content = self.train(number)
        told = {"X-Samples": str(self.rows), "X-SHA256": hashlib.sha256(content).hexdigest()}
        try:
            self.ask(f"/rounds/{number}/updates/{self.name}", content, **told)
            self.say(f"round {number}: {len(content):,} bytes sent")
        except ValueError as error:
            if "(409)" not in str(error):
                raise
            self.say(f"round {number}: it was over before the update came")

    def run(self, rounds):
        """Take part in rounds until the server has so many behind it."""
        done = -1
        while (number := self.number()) < rounds:
            if number == done:
                time.sleep(WAIT)
            else:
                self.take_part(number)
                done = number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("url", "manifest", "data", "name"):
        parser.add_argument(name)
    parser.add_argument("--token", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with np.load(given.data) as file:
        arrays = dict(file)
    Client(given.url, given.manifest, arrays, given.name, given.token).run(given.rounds)


if __name__ == "__main__":
    main()
