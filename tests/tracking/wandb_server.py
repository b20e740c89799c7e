"""Just enough of a W&B server, on loopback, for runs, resumed runs and `wandb sync`: it keeps what they send, and may refuse or hang."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer:
    """`runs`: variables of UpsertBucket by run id, later ones over earlier ones. `status`: answers to file_stream; 0: none at all."""

    def __init__(self):
        self.runs: dict[str, dict] = {}
        self.lines: dict[str, dict[int, dict]] = {}  # history rows by run id and offset, as the real one keeps them
        self.exit_codes: list[int] = []
        self.status = 200
        self._hanging = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/graphql":
                    self.answer(200, outer.graphql(body))
                elif outer.status == 0:
                    outer._hanging.wait()
                elif outer.status != 200:
                    self.answer(outer.status, {"error": "refused"})
                else:
                    self.answer(200, outer.file_stream(self.path.split("/")[-2], body))

            def do_PUT(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200, {})

            def answer(self, status, content):
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def rows(self):
        """The history of the only run, in order, without W&B's own columns."""
        (lines,) = self.lines.values() or [{}]
        return [{key: value for key, value in lines[offset].items() if key[0] != "_"} for offset in sorted(lines)]

    def graphql(self, request):
        variables = request.get("variables") or {}
        match request["operationName"]:
            case "Viewer":
                return {"data": {"viewer": {"id": "1", "entity": "tester", "username": "tester", "flags": "{}", "teams": {"edges": []}}}}
            case "ServerFeaturesQuery":
                return {"data": {"serverInfo": {"features": []}}}
            case "RunResumeStatus":
                return {"data": {"model": {"bucket": self._resume_status(variables["name"])}}}
            case "UpsertBucket":
                given = {key: value for key, value in variables.items() if value is not None}
                self.runs[given["name"]] = self.runs.get(given["name"], {}) | given
                return {"data": {"upsertBucket": {"bucket": self._bucket(given["name"]), "inserted": True}}}
        return {"data": {}, "errors": [{"message": "unknown here"}]}

    def file_stream(self, run_id, request):
        history = request.get("files", {}).get("wandb-history.jsonl", {"content": [], "offset": 0})
        lines = self.lines.setdefault(run_id, {})
        lines |= {history["offset"] + k: json.loads(line) for k, line in enumerate(history["content"])}
        if request.get("complete"):
            self.exit_codes.append(request["exitcode"])
        return {"exitcode": None, "limits": {}}

    def _bucket(self, name):
        project = {"id": "1", "name": self.runs[name].get("project", "p"), "entity": {"id": "1", "name": "tester"}}
        return {"id": name, "name": name, "displayName": name, "config": "{}", "project": project, "sweepName": None, "historyLineCount": 0}

    def _resume_status(self, name):
        if name not in self.runs:
            return None
        lines = self.lines.get(name, {})
        tail = [json.dumps(lines[max(lines)])] if lines else []
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        state = {"historyTail": json.dumps(tail), "eventsTail": "[]", "summaryMetrics": "{}", "wandbConfig": json.dumps({"t": {}})}
        return self._bucket(name) | counts | state | {"tags": []}

    def stop(self):
        """The port is closed, so that whoever comes later is refused."""
        self._hanging.set()
        self._server.shutdown()
        self._server.server_close()
