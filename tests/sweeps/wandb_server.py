"""A W&B server on loopback, for the real SDK and the real `wandb sweep`, `wandb agent` and `wandb sync`.

It answers what they ask (GraphQL and the file stream), hands runs out from W&B's own engine, one at a time to an agent, stops what
Hyperband gives up, and keeps what arrives. It can misbehave: see `Fault`.

To answer one more operation: a method `_OperationName(self, variables) -> data`.
"""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sweeps

ENTITY, PROJECT = "tester", "demo"


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that hung up is no fault: processes end in the middle of requests here."""


@dataclass
class Fault:
    """What the server does instead of answering: to requests whose operation or path matches `what`, the next `times` of them."""

    what: str
    status: int = 500
    delay_s: float = 0.0  # before an answer, which is the right one where status is 200
    times: int = 10**9


@dataclass
class Run:
    """What the server knows of a run."""

    name: str
    sweep: str | None = None
    agent: str | None = None
    issued: dict = field(default_factory=dict)  # the sweep's parameters
    config: dict = field(default_factory=dict)  # as the run shows it
    group: str | None = None
    rows: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    num_inits: int = 0  # processes that made the run: each says once on which host it is
    state: str = "pending"
    exit_code: int | None = None
    told_to_stop: bool = False


class WandbServer:
    """Serves from the moment it is made until `close`; then it is gone for good, as after a crash."""

    def __init__(self):
        self.sweeps: dict[str, dict] = {}
        self.states: dict[str, str] = {}
        self.runs: dict[str, Run] = {}
        self.agents: dict[str, str] = {}  # agent -> sweep
        self.faults: list[Fault] = []
        self.unknown: list[str] = []  # operations that were asked for and are not answered here
        self._ids = count(1)
        self._lock = threading.RLock()
        self._http = _Http(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def runs_of(self, sweep):
        return [run for run in self.runs.values() if run.sweep == sweep]

    # -------------------------------------------------------------------------------------------------------------- HTTP

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self._body()
                if self.path == "/graphql":
                    request = json.loads(body)
                    name = request.get("operationName") or re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
                    self._answer(name, lambda: server._graphql(name, request.get("variables") or {}))
                else:
                    self._answer(self.path, lambda: server._file_stream(self.path, json.loads(body)))

            def do_PUT(self):
                self._body()
                self._answer(self.path, dict)

            def do_GET(self):
                self._answer(self.path, dict)

            def _body(self):
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return body
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, what, make):
                fault = server._fault(what)
                if fault:
                    time.sleep(fault.delay_s)
                status = fault.status if fault else 200
                data = json.dumps(make() if status == 200 else {"error": "as the test wants it"}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        return Handler

    def _fault(self, what):
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.what, what):
                    fault.times -= 1
                    return fault
        return None

    def _graphql(self, name, variables):
        with self._lock:
            answer = getattr(self, f"_{name}", None)
            if answer is None:
                self.unknown.append(name)
                return {"data": None, "errors": [{"message": f"no operation {name} here"}]}
            return {"data": answer(variables)}

    # ----------------------------------------------------------------------------------------------------------- account

    def _Viewer(self, variables):
        known = {"id": "1", "entity": ENTITY, "username": ENTITY, "email": "t@localhost", "name": ENTITY, "admin": False, "flags": "{}"}
        return {"viewer": known | {"teams": {"edges": []}, "deletedAt": None, "apiKeys": {"edges": []}}}

    def _ServerFeaturesQuery(self, variables):
        return {"serverInfo": {"features": []}}

    def _OrganizationCoreWeaveOrganizationID(self, variables):
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    # ------------------------------------------------------------------------------------------------------------- sweeps

    def _project(self):
        return {"id": "1", "internalId": "1", "name": PROJECT, "entityName": ENTITY, "entity": {"id": "1", "name": ENTITY}}

    def _UpsertSweep(self, variables):
        name = f"sweep{next(self._ids)}"
        self.sweeps[name], self.states[name] = yaml.safe_load(variables["config"]), "PENDING"
        sweep = {"id": name, "name": name, "state": "PENDING", "project": self._project()}
        return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}

    def _SweepWithRuns(self, variables):
        name = variables["sweep"]
        if name not in self.sweeps:
            return {"project": {"sweep": None}}
        empty = ["description", "displayName", "bestLoss", "controller", "scheduler", "priorRuns", "controllerRunName", "runCountExpected"]
        times = ["createdAt", "heartbeatAt", "updatedAt"]
        found = dict.fromkeys(empty) | dict.fromkeys(times, "2026-01-01T00:00:00Z") | {"id": name, "name": name, "runCount": 0}
        found |= {"method": self.sweeps[name]["method"], "state": self.states[name], "config": yaml.safe_dump(self.sweeps[name])}
        found |= {"earlyStopJobRunning": False, "runs": {"edges": [], "pageInfo": {"hasNextPage": False, "endCursor": None}}}
        return {"project": self._project() | {"sweep": found}}

    def _CreateAgent(self, variables):
        agent = f"agent{next(self._ids)}"
        self.agents[agent] = variables["sweep"]
        return {"createAgent": {"agent": {"id": agent}}}

    def _Heartbeat(self, variables):
        agent = variables["id"]
        return {
            "agentHeartbeat": {"agent": {"id": agent}, "commands": json.dumps(self._commands(agent, json.loads(variables["runState"])))}
        }

    def _commands(self, agent, alive):
        sweep = self.agents[agent]
        for run in self.runs_of(sweep):
            if run.agent == agent and run.name not in alive and run.state in ("pending", "running"):
                run.state = "crashed"  # gone without a word
        config = self.sweeps[sweep]
        if "early_terminate" in config:
            for stopped in sweeps.stop_runs(config, [self._as_sweep_run(run, config) for run in self.runs_of(sweep)]):
                self.runs[stopped.name].told_to_stop = True
        if alive:
            return [{"type": "stop", "run_id": name} for name in alive if self.runs[name].told_to_stop]
        suggestion = sweeps.next_run(config, [self._as_sweep_run(run, config) for run in self.runs_of(sweep)])
        if suggestion is None or len(self.runs_of(sweep)) >= config.get("run_cap", 10**9):
            self.states[sweep] = "FINISHED"
            return [{"type": "exit"}]
        name = f"run{next(self._ids):04d}"
        self.runs[name] = Run(name, sweep, agent, issued={key: entry["value"] for key, entry in suggestion.config.items()})
        self.states[sweep] = "RUNNING"
        return [{"type": "run", "run_id": name, "program": config.get("program", "x.py"), "args": suggestion.config, "logs": []}]

    def _as_sweep_run(self, run, config):
        metric = config.get("metric", {}).get("name")
        return sweeps.SweepRun(
            name=run.name,
            state=run.state,
            config={key: {"value": value} for key, value in run.issued.items()},
            history=[{metric: row[metric]} for row in run.rows if metric in row],
        )

    # --------------------------------------------------------------------------------------------------------------- runs

    def _RunResumeStatus(self, variables):
        return {"model": {"bucket": None}}

    def _UpsertBucket(self, variables):
        name = variables["name"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, Run(name))
        if variables.get("sweep"):
            run.sweep = variables["sweep"]
        run.num_inits += variables.get("host") is not None
        if variables.get("config"):
            run.config = {key: entry["value"] for key, entry in json.loads(variables["config"]).items() if key != "_wandb"}
        run.group = variables.get("groupName") or run.group
        if variables.get("summaryMetrics"):
            run.summary |= json.loads(variables["summaryMetrics"])
        if run.exit_code is None:
            run.state = "running"
        shown = json.dumps({key: {"value": value} for key, value in run.config.items()})
        bucket = {"id": name, "name": name, "displayName": name, "sweepName": run.sweep, "project": self._project(), "config": shown}
        bucket |= {"historyLineCount": 0, "logLineCount": 0, "eventsLineCount": 0, "summaryMetrics": "{}", "tags": [], "description": None}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _CreateRunFiles(self, variables):
        files = [{"name": name, "uploadUrl": f"{self.url}/storage/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _file_stream(self, path, body):
        with self._lock:
            run = self.runs[path.split("/")[-2]]
            files = body.get("files") or {}
            for line in files.get("wandb-history.jsonl", {}).get("content", []):
                run.rows.append(json.loads(line))
            for line in files.get("wandb-summary.json", {}).get("content", []):
                run.summary |= json.loads(line)
            if body.get("complete"):
                run.exit_code = body.get("exitcode")
                run.state = "finished" if run.exit_code == 0 else "killed" if run.told_to_stop else "failed"
            return {"exitcode": None, "limits": {}, "stopped": run.told_to_stop}

    # ---------------------------------------------------------------------------------------------------------- artifacts

    def _CreateArtifact(self, variables):
        return {"createArtifact": {"artifact": {"id": "1", "state": "COMMITTED", "artifactSequence": {"id": "1", "latestArtifact": None}}}}
