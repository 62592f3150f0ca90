"""What every transport must do, on a GPU: the very tests of `tests/transfer/test_conformance.py`."""

import pytest

from tests.transfer.test_conformance import *  # noqa: F403

pytestmark = pytest.mark.gpu
