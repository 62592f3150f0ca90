"""Lets the model choose: the choices are scored as what comes next, and the likeliest is written."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient
from router.client.program import SyncProgram

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
    program = SyncProgram(client, max_tokens=12, temperature=0)
    program.text("Paris is the capital of")
    program.select("country", [" France", " Peru", " the Moon"])
    program.text(". Its language is")
    program.select("language", [" French", " Japanese"])
    for name in ("country", "language"):
        scores = ", ".join(f"{choice.strip()} {score:.2f}" for choice, score in program.selections[name].scores.items())
        print(f"{name}:{program[name]} ({scores})")
