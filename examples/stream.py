"""Streams one answer, and says at the end where it was computed and what the cache saved."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
parser.add_argument("question", nargs="?", default="Why is the sky blue?")
given = parser.parse_args()

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
    for event in client.stream([{"role": "user", "content": given.question}], max_tokens=32, temperature=0):
        if event.WhichOneof("event") == "delta":
            print(event.delta.text, end="", flush=True)
        elif event.WhichOneof("event") == "finished":
            end = event.finished
            print(f"\n\n{end.usage.output_tokens} tokens, {end.usage.cached_tokens} of the prompt's were cached")
            print(f"read by {end.prefill_worker}, written by {end.decode_worker}")
