"""Counts tokens before it asks, and cuts a prompt that would not fit."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
    (model,) = client.models()
    ids = client.tokenize("Hello, world!")
    print(f"{model.name} reads {len(ids)} tokens: {ids}, which say {client.detokenize(ids)!r}")
    chat = [{"role": "user", "content": "Hello, world!"}]
    print(f"with its template {len(client.tokenize(chat))} of {model.context_tokens}")
    answer = client.generate("word " * 200 + "the end is", max_tokens=4, truncate_prompt_tokens=16)
    print(f"of a long prompt the last {answer.prompt_tokens} tokens were read")
