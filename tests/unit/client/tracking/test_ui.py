"""Whether MLflow's UI answers, on a port that another program may have taken."""

import socketserver
import subprocess
import sys
import threading
import time

from nbdist.client.tracking.shipping.ui import _answers


class _NoHTTP(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"\xff\x00\x00 nothing that HTTP knows\r\n\r\n")


def test_a_program_that_speaks_no_http_on_the_port_is_no_answer_and_no_error() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NoHTTP) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
        url = f"http://127.0.0.1:{other.server_address[1]}/health"
        assert not _answers(url, server, time.monotonic() + 30)
        assert server.wait() == 0
        other.shutdown()
