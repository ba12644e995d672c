"""A program in the place of `vllm`: it answers /health, and has a child of its own as vLLM has.

    stub_vllm serve MODEL --host H --port P [--fail "a word"] [--pid-file F]
"""

import argparse
import http.server
import os
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("words", nargs=2)
for name in ("host", "port", "fail", "pid-file", "seed"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
print("stub", args, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if args.fail:
    sys.exit(args.fail)
child = subprocess.Popen(["sleep", "300"])
if args.pid_file:
    with open(args.pid_file, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
with open(os.environ["JAXFP8RL_TOKEN_FILE"]) as file:
    token = file.read()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ok = self.headers["Authorization"] == f"Bearer {token}" and self.path == "/health"
        self.send_response(200 if ok else 401)
        self.end_headers()

    def log_message(self, *_):
        pass


http.server.HTTPServer((args.host, int(args.port)), Handler).serve_forever()
