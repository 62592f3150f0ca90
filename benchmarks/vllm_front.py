"""vLLM's API server in the place of the router of `benchmarks.front`, before an engine of no model.

The server is all of vLLM's own front: HTTP, input processing, and of outputs the processor that makes text of token
ids. Only the client of its engine is replaced, in the server's process: where the real one reads a socket to another
process, this one sleeps until the next step is due. So the socket and what is decoded from it are missing from the
server's account, and making the outputs, a small object a token, is in it. The engine steps in as many groups of
requests as there would be workers.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.front_peers import FrontProcess

CONTEXT_TOKENS = 1 << 20
# What runs in vLLM's interpreter. It cannot import anything of ours. Its input is a rate a line.
SERVER = """
import asyncio, sys, threading, time
folder, port, groups, tick_s, period = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
rate = 20.0
def read():
    global rate
    for line in sys.stdin:
        rate = float(line)
threading.Thread(target=read, daemon=True).start()
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import EngineCoreClient
class SteppingClient:
    def __init__(self):
        self.resources, self.engine_dead, self.count = self, False, 0
        self.groups = [{} for _ in range(groups)]
        self.due = [0.0] * groups
    def __getattr__(self, name):
        if not name.endswith("_async"):
            raise AttributeError(name)
        async def nothing(*arguments, **named):
            return None
        return nothing
    def shutdown(self, timeout=None):
        pass
    def validate_alive(self, *arguments):
        pass
    def get_kv_event_sources(self):
        return {}
    async def get_supported_tasks_async(self):
        return ("generate",)
    async def add_request_async(self, request):
        self.groups[self.count % groups][request.request_id] = None
        self.count += 1
    async def abort_requests_async(self, names):
        for group in self.groups:
            for name in names:
                group.pop(name, None)
    async def get_output_async(self):
        at = min(range(groups), key=self.due.__getitem__)
        now = time.monotonic()
        if not self.due[at]:
            self.due = [now + n / groups / rate for n in range(groups)]
        await asyncio.sleep(max(0.0, self.due[at] - now))
        self.due[at] = max(self.due[at] + 1 / rate, time.monotonic())
        token = int(time.monotonic() / tick_s) % period
        return EngineCoreOutputs(outputs=[EngineCoreOutput(name, [token]) for name in self.groups[at]])
EngineCoreClient.make_async_mp_client = staticmethod(lambda *arguments, **named: SteppingClient())
import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
asked = ["--model", folder, "--host", "127.0.0.1", "--port", port, "--served-model-name", "hex",
    "--disable-log-stats", "--uvicorn-log-level", "error", "--disable-uvicorn-access-log"]
uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(asked)))
"""


def write_model(folder: Path, vocabulary: int) -> None:
    """Write what vLLM reads of a model without weights whose token i reads as " %04x"; one token more is the end."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({f"Ġ{i:04x}": i for i in range(vocabulary)} | {"</s>": vocabulary}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": CONTEXT_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": vocabulary + 1,
        "max_position_embeddings": CONTEXT_TOKENS,
        "torch_dtype": "float32",
        "bos_token_id": vocabulary,
        "eos_token_id": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config))


class VllmFront(FrontProcess):
    """A process of vLLM's API server. `send` names the rate of its engine, in steps a second."""

    def __init__(self, python: Path, groups: int, tick_s: float, vocabulary: int) -> None:
        """Raises RuntimeError if it does not start."""
        self._folder = TemporaryDirectory(prefix="vllm-front-")
        write_model(Path(self._folder.name), vocabulary)
        told = [str(groups), str(tick_s), str(vocabulary)]
        super().__init__(lambda port: [str(python), "-c", SERVER, self._folder.name, str(port), *told], "/health")

    def send(self, rate: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%f\n" % rate)
        self.process.stdin.flush()

    def join(self) -> None:
        super().join()
        self._folder.cleanup()
