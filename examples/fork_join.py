"""Goes on in three ways at once from one beginning, which is read once: the branches find it in the cache."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient
from router.client.program import SyncProgram, join

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

STORY = "A traveller comes to a village by the sea, and asks for a room. " * 8
TOPICS = ("the innkeeper", "the weather", "the traveller's dog")


def describe(branch: SyncProgram) -> str:
    return branch.gen("description")


with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
    program = SyncProgram(client, max_tokens=16, temperature=0)
    branches = program.text(STORY).fork(len(TOPICS))
    for branch, topic in zip(branches, TOPICS, strict=True):
        branch.text(f"Now about {topic}:")
    texts = join(branches, describe)
    for branch, topic, text in zip(branches, TOPICS, texts, strict=True):
        answer = branch.answers["description"]
        print(f"{topic} ({answer.cached_tokens} of {answer.prompt_tokens} tokens cached):{text}")
