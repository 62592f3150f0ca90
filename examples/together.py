"""Asks many questions at once on one event loop, and prints the answers as they end."""

import argparse
import asyncio
import os

from router.client.channel import ClientSecrets
from router.client.client import ADDRESS, AsyncClient
from router.client.program import AsyncProgram

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default=ADDRESS)
given = parser.parse_args()

CITIES = ("Rome", "Cairo", "Lima", "Oslo")


async def ask(client: AsyncClient, city: str) -> str:
    program = AsyncProgram(client, max_tokens=12, temperature=0)
    program.system("You answer in one short sentence.").user(f"In which country is {city}?")
    return f"{city}: {await program.gen('country')}"


async def main() -> None:
    async with AsyncClient(given.address, secrets=ClientSecrets.of_variables(os.environ)) as client:
        for done in asyncio.as_completed([ask(client, city) for city in CITIES]):
            print(await done)


asyncio.run(main())
