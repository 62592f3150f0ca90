"""A program with roles: who speaks is said, and each answer has a name."""

import argparse
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient
from router.client.program import SyncProgram

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
    talk = SyncProgram(client, max_tokens=24, temperature=0)
    talk.system("You answer in one short sentence.")
    talk.user("Name a river in Europe.")
    talk.gen("river")
    talk.user("In which sea does it end?")
    talk.gen("sea")
    for name in ("river", "sea"):
        print(f"{name}: {talk[name]}")
    second = talk.answers["sea"]
    print(f"{second.cached_tokens} of the second question's {second.prompt_tokens} tokens were cached")
