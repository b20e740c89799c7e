"""Servers of the tests on loopback: a real one (`transformers serve`), one that speaks vLLM's token ids with a real model behind it,
and one that misbehaves to order."""

import asyncio
import contextlib
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import torch
from transformers import DynamicCache

from rllm_lightning.rollout.engine import SamplingParams
from rllm_lightning.rollout.sampling import BatchSampling, sample


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def transformers_serve(folder, log):
    """`transformers serve` over a model folder, as its command line starts it; the base URL."""
    port = free_port()
    command = ["serve", str(folder), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--default-seed", "0"]
    code = f"import sys; sys.argv[1:] = {command!r}; from transformers.cli.transformers import main; main()"
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def json_server(answer):
    """A server in a thread of its own: `await answer(path, body, headers)` gives (status, object or bytes), None (the connection
    is cut), or never returns; the base URL."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    port = free_port()

    async def talk(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
                reply = await answer(first.split()[1], body, headers)
                if reply is None:
                    break
                status, content = reply
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)
                await writer.drain()
        writer.close()

    async def serve():
        server = await asyncio.start_server(talk, "127.0.0.1", port)
        started.set()
        async with server:
            await server.serve_forever()

    def run():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    serving = loop.create_task(serve())
    thread = threading.Thread(target=run)
    thread.start()
    started.wait(30)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(30)


class TokenServer:
    """vLLM's way to exchange token ids (`return_token_ids`, `/collective_rpc`), with a model of its own behind it; the answers are
    drawn by plain forward passes."""

    def __init__(self, model):
        self.model = model.eval()
        self.num_reloads = 0

    async def answer(self, path, body, headers):
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.model = type(self.model).from_pretrained(body["kwargs"]["weights_path"]).eval()
            self.num_reloads += 1
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, b""
        assert path == "/v1/completions"
        assert (body["return_token_ids"], body["add_special_tokens"], body["repetition_penalty"]) == (True, False, 1.0)
        tokens, logprobs = self._draw(body)
        choice = {"text": "", "token_ids": tokens, "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": logprobs}}
        return 200, {"choices": [{**choice, "finish_reason": "stop" if tokens[-1] in body["stop_token_ids"] else "length"}]}

    def _draw(self, body):
        params = SamplingParams(body["temperature"], body["top_p"], body["top_k"], body["max_tokens"])
        sampling = BatchSampling.of([params], torch.device("cpu"))
        uniforms = np.random.default_rng(body["seed"]).random(body["max_tokens"])
        ids, logprobs, cache = list(body["prompt"]), [], DynamicCache(config=self.model.config)
        cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        new = ids[:]
        for uniform in uniforms:
            with torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([new]), use_cache=True, **{cache_name: cache}).logits[:, -1]
                token, logprob = sample(logits, torch.tensor([uniform], dtype=torch.float64), sampling)
            new = [int(token)]
            ids += new
            logprobs.append(float(logprob))
            if new[0] in body["stop_token_ids"]:
                break
        return ids[len(body["prompt"]) :], logprobs
