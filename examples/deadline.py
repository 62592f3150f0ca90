"""Keeps a deadline: what is refused for now is asked again while there is time, and no longer."""

import argparse
import os
import time

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, SyncClient
from router.client.errors import ApiError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

with SyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ), timeout_s=20.0) as client:
    began_s = time.monotonic()
    answer = client.generate("The capital of France is", max_tokens=4, temperature=0)
    print(f"in time, after {time.monotonic() - began_s:.2f} s:{answer.text}")
    try:
        client.generate("A very long story:", max_tokens=400, ignore_eos=True, timeout_s=0.05)
    except ApiError as error:
        # By prediction it could not be met (RESOURCE_EXHAUSTED), or it passed.
        print(f"too late: {error.code}")
    try:
        client.generate("x", max_tokens=0)
    except ApiError as error:
        print(f"never right, so asked once: {error.code}, field {error.field}")

with SyncClient("127.0.0.1:9", timeout_s=1.0) as nobody:
    began_s = time.monotonic()
    try:
        nobody.generate("x")
    except ApiError as error:
        print(f"gave up on an absent server within its second: {error.code}, {time.monotonic() - began_s < 2.0}")
