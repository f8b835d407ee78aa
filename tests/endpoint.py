# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An OpenAI-compatible endpoint that is a thread of the test's process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    """A server that keeps what it was asked, and answers as `reply(body)` says: a status and a body."""

    def __init__(self, reply):
        endpoint, self.bodies, self.headers, self.paths = self, [], [], []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.bodies.append(body)
                    endpoint.headers.append(self.headers)
                    endpoint.paths.append(self.path)
                status, answer = reply(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if content.startswith(b"<") else "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("retry-after-ms", "1")  # the client obeys: no test waits for it
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def choices(*contents) -> dict:
    messages = [{"role": "assistant", "content": content} for content in contents]
    listed = [{"index": i, "finish_reason": "stop", "message": message} for i, message in enumerate(messages)]
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": listed}


def echo(body):
    return 200, choices(*(f"{body['messages'][-1]['content']}/{i}" for i in range(body["n"])))
