"""How the answer to one HTTP request is written: all that a resumed stream must share with its beginning."""

import msgspec


class HttpForm(msgspec.Struct, frozen=True, kw_only=True):
    """Beside `Started` and the output, what every byte of a streamed answer depends on. `created` is in seconds since
    the epoch, `label` the caller's own name for the request (`x-request-id`), empty where there is none."""

    chat: bool
    include_usage: bool
    return_token_ids: bool
    created: int
    label: str = ""
