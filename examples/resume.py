"""Loses its connection in the middle of an answer, and reads the rest over another: nothing is lost, nothing twice."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

first = SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ))
token, seen = "", []
events = first.stream("Once upon a time", max_tokens=24, temperature=0)
for event in events:
    if event.WhichOneof("event") == "started":
        token = event.started.resume_token
    seen += event.delta.token_ids
    if len(seen) >= 4:
        break
# As if this machine had lost its network. The server goes on, and keeps the answer for half a minute.
first.close()
print(f"lost the connection after {len(seen)} tokens")

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as second:
    ids, text = [], ""
    for event in second.resume(token):
        ids += event.delta.token_ids
        text += event.delta.text
assert ids[: len(seen)] == seen
print(f"came back for {len(ids)} tokens in all:{text}")
