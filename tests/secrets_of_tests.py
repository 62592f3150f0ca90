"""The one secret of every cluster that tests put together themselves."""

from engine.handshake import Keyring

SECRET = b"the secret of all tests: 32 bytes"
SECRETS = Keyring((SECRET,))
