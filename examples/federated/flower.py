"""Federated averaging with Flower: python flower.py step.json data.npz [--clients 5] [--rounds 5]

It needs `pip install "flwr[simulation]"`, which simulates the clients on this machine, each with rows of its own. A
round carries the flat parameters of a step that `opgrad step --flat` has exported. They are the parameters that are
trained, and no others: with an artifact set whose adapters alone are trained, a round carries the adapters.

`client_app` and `server_app` make the two parts of a Flower app. In an app of your own they stand in the files that
`flwr run` finds, and a client reads its own file in place of a share of one.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

HELD_OUT = 5  # one row of so many is the server's, and tells how good the parameters are
BATCH, RATE, EPOCHS = 20, 0.003, 2


def opened(manifest):
    """The step of an export, which must be flat, and the description of its parameters."""
    sys.path.append(str(Path(__file__).parents[1] / "python"))
    from step import Step

    step = Step(manifest)
    first = step.manifest["state"][0]
    if first["bytes"] != step.manifest["weights"]["bytes"]:
        raise ValueError(f"{manifest}: the step is not flat, expected `opgrad step --flat`")
    return step, first


def rows_of(data, held_out):
    """The rows of a file that the server keeps, or those of the clients together."""
    with np.load(data) as file:
        arrays = dict(file)
    kept = np.arange(len(next(iter(arrays.values())))) % HELD_OUT == 0
    return {name: array[kept if held_out else ~kept] for name, array in arrays.items()}


def record_of(step, first):
    return ArrayRecord({"parameters": Array(step.state[first["input"]])})


def size_of(record):
    """The bytes of a record's parameters. A message has a few hundred more, which describe them."""
    return sum(array.numpy().nbytes for array in record.values())


def take(step, first, record):
    """Let a step go on from the parameters of a record, with fresh moments."""
    found = record["parameters"].numpy()
    if found.dtype != first["dtype"] or found.nbytes != first["bytes"] or not np.isfinite(found).all():
        raise ValueError(f"parameters are {found.nbytes} bytes of {found.dtype}, expected {first['bytes']} finite ones")
    step.load(step.read("weights"))
    step.state[first["input"]] = found.reshape(first["shape"])


# --- client ----------------------------------------------------------------------------------------------------------


def client_app(manifest, data):
    """What a client does: it trains on its share of a file's rows, and sends what the parameters became."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        step, first = opened(manifest)
        take(step, first, message.content["arrays"])
        own, count = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
        arrays = {name: array[own::count] for name, array in rows_of(data, held_out=False).items()}
        order, losses = np.random.default_rng(int(message.content["config"]["server-round"])), []
        rows = len(next(iter(arrays.values())))
        for _ in range(EPOCHS):
            shuffled = order.permutation(rows)
            for start in range(0, rows, BATCH):
                picked = shuffled[start : start + BATCH]
                losses.append(step.train({name: array[picked] for name, array in arrays.items()}, RATE))
        told = MetricRecord({"num-examples": rows, "loss": float(np.mean(losses))})
        return Message(RecordDict({"arrays": record_of(step, first), "metrics": told}), reply_to=message)

    return app


# --- server ----------------------------------------------------------------------------------------------------------


class Told(FedAvg):
    """Averages weighted by rows, as Flower makes them; it prints what each round does."""

    def __init__(self, rounds, clients, first):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.rounds, self.first, self.began, self.sent = rounds, first, 0.0, 0

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.began, self.sent = time.perf_counter(), size_of(arrays) * len(messages)
        say(f"round {server_round} of {self.rounds}: {size_of(arrays):,} bytes go to each of {len(messages)} clients")
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                say(f"  a client failed: {reply.error.reason}")
        good = [reply for reply in replies if not reply.has_error() and self.fits(reply)]
        back = sum(size_of(reply.content["arrays"]) for reply in good)
        rows = sum(reply.content["metrics"]["num-examples"] for reply in good)
        arrays, metrics = super().aggregate_train(server_round, good)
        loss = f", their loss {metrics['loss']:.3f}" if metrics else ""
        seconds = time.perf_counter() - self.began
        say(f"  {len(good)} of {len(replies)} clients answer after {seconds:.1f} s, trained on {rows:,} rows{loss}")
        say(f"  {self.sent + back:,} bytes in this round: {self.sent:,} to the clients, {back:,} back")
        return arrays, metrics

    def fits(self, reply):
        """Whether the parameters of a reply may be averaged; says why, if not."""
        found = reply.content["arrays"]["parameters"].numpy()
        good = found.nbytes == self.first["bytes"] and found.dtype == self.first["dtype"] and np.isfinite(found).all()
        if not good:
            say(f"  left out: {found.nbytes:,} bytes of {found.dtype}, expected {self.first['bytes']:,} finite ones")
        return bool(good)


def say(text):
    print(text, flush=True)


def server_app(manifest, data, clients, rounds, output=None):
    """What the server does: rounds of averages, each tried on rows that no client has; then it writes the weights."""
    app = ServerApp()

    @app.main()
    def main(grid, context):
        step, first = opened(manifest)
        test = rows_of(data, held_out=True)

        def evaluate(number, arrays):
            take(step, first, arrays)
            found = step.evaluate(test)
            accuracy = f", accuracy {float(found['accuracy']):.3f}" if "accuracy" in found else ""
            loss = float(np.reshape(found["loss"], -1)[0])
            when = f"after round {number}" if number else "at first"
            say(f"  {when}: loss {loss:.3f}{accuracy} on {len(next(iter(test.values()))):,} rows that no client has")
            return MetricRecord({"loss": loss})

        start = record_of(step, first)
        result = Told(rounds, clients, first).start(
            grid, start, num_rounds=rounds, train_config=ConfigRecord(), evaluate_fn=evaluate
        )
        if output is not None:
            take(step, first, result.arrays)
            step.save(output)
            say(f"written: {output}")

    return app


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("manifest", type=Path, help="of a step with --flat, --eval, --output-name accuracy")
    parser.add_argument("data", type=Path, help="an .npz file with an array for every input")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="the file for the trained weights")
    given = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # says nothing of accelerators
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    manifest, data = given.manifest.absolute(), given.data.absolute()
    output = given.output and given.output.absolute()
    say(f"{given.clients} clients are simulated, which takes some seconds to begin")
    server = server_app(manifest, data, given.clients, given.rounds, output)
    run_simulation(server, client_app(manifest, data), given.clients)


if __name__ == "__main__":
    main()
