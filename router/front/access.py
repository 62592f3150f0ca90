"""Lets callers in, for both fronts: a credential becomes a caller, and a call becomes that of the caller's tenant.

Where no credentials are configured everybody is let in, and the tenant is the one that the call names.
"""

from collections.abc import Sequence

import msgspec

from access.authenticator import Authenticator
from access.config import AccessConfig
from access.limits import LimitedError
from access.tenants import HIGHEST_PRIORITY, Caller, DeniedError
from router.front.api import ApiError, GenerateCall

OPEN = Authenticator(AccessConfig())
"""Asks for nothing."""


def let_in(authenticator: Authenticator, authorization: str, names: Sequence[str] | None) -> Caller:
    """Return who shows these credentials (`Authenticator.caller`). Raises ApiError."""
    try:
        return authenticator.caller(authorization, names)
    except DeniedError as error:
        raise _refusal(error) from error


def check_monitor(caller: Caller) -> None:
    """Raises ApiError where the caller may not read metrics."""
    try:
        caller.check_monitor()
    except DeniedError as error:
        raise _refusal(error) from error


def as_tenant(call: GenerateCall, caller: Caller) -> GenerateCall:
    """Return the call under the tenant of its credential, with no higher priority than that may ask for. Raises
    ApiError where it names another tenant."""
    priority = call.priority
    if priority <= HIGHEST_PRIORITY:  # any other is refused for what it is
        priority = min(priority, caller.max_priority)
    return msgspec.structs.replace(call, tenant=tenant_for(caller, call.tenant), priority=priority)


def tenant_of(caller: Caller) -> str | None:
    """Return whose streams a caller may resume and cancel; None: anybody's, with their token. Raises ApiError."""
    return tenant_for(caller, "") if caller.is_known else None


def limited(error: LimitedError) -> ApiError:
    """Say that a tenant has used what it may."""
    if error.retry_after_s is None:
        return ApiError("INVALID_ARGUMENT", error.message, "n")
    return ApiError("RESOURCE_EXHAUSTED", error.message, retry_after_s=error.retry_after_s)


def tenant_for(caller: Caller, asked: str) -> str:
    """Return the tenant of a caller that names `asked`, or nobody. Raises ApiError where it is another's."""
    try:
        return caller.tenant_for(asked)
    except DeniedError as error:
        raise _refusal(error) from error


def _refusal(error: DeniedError) -> ApiError:
    return ApiError(error.code, error.message, error.field)
