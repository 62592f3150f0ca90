"""The one error that clients raise. Needs nothing, so that the fronts and the light client share it."""

NOBODY = "nobody answers"
"""The beginning of a client's error where no server was reached at all."""


class ApiError(Exception):
    """Any request that ends badly. `code` names a gRPC status code, `field` the request field at fault."""

    def __init__(self, code: str, message: str, field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
