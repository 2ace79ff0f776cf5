"""Hosts made of Linux namespaces, with real sshd, Slurm and MPI: the bed of `pytest -m hosts`.

Every test host has its own network (10.77.0.x on one switch), mounts, processes, hostname, home,
/tmp, /dev/shm, /run and sshd. It sees the interpreter and this repository read-only, at their
paths. A test asks for `bed`: hosts a, b, c and d, healthy, with nothing left running:

    def test_two_hosts_train(bed: Bed) -> None:
        a, b = bed["a"], bed["b"]
        a.write("train.py", "...")                           # in its home, /root
        done = a.run([sys.executable, "train.py"], timeout_s=60)
        a.run(["ssh", "-o", "BatchMode=yes", "b", "true"])   # keys and known_hosts are there
        b.power_cut()                                        # the next test gets b back
        assert a.left_running() == []

`Host.popen` is for what goes on; `child_pid(popen)` is the command itself, for kill -9 and SIGINT.
`Kernel(host)` is a notebook's kernel in a host: `kernel.run("%load_ext nbdist")` returns its text.
`bed.shared` is a folder that all hosts and the test see under the same path (an NFS, so to speak);
`host.path("/root/x")` is what the test opens to read a host's own file.

Faults: `power_cut` (no packet tells it), `shut_down` (sockets are closed), `power_on`, `link_down`,
`link_up`, `cut("in" | "out")`, `pause`, `resume`, `shape("100mbit")`, `delay(0.02)`,
`block_ports(...)`, `fill_disk`, `refuse_keys`, `hide(path)`, `replace(path, text)`,
`name_itself("127.0.1.1")`, `shift_clock(3600)`; `sent_bytes()` counts.

A test that asks for `slurm` gets four nodes of their own in one partition, `main`, and a controller
on a: `slurm.run(["squeue"])`, `slurm.submit([...])`, `slurm.jobs()`, `slurm.node_down("c")`, which
Slurm notices after 10 to 15 s; `slurm.bed["a"]` is the host to run a notebook on. With `mpi.py`,
Open MPI and MPICH start ranks on hosts by ssh: `mpi.run("mpich", hosts, command)`. With `hub.py`,
JupyterHub runs on a, and its users' servers are jobs: `Hub(slurm, settings, folder)`.

All of it ends with the test process, however that ends. Tests carry `pytestmark =
pytest.mark.hosts`, are skipped where the machine cannot do it, and fail there under
NBDIST_REQUIRE_HOSTS=1, as `.ci/run` sets it: `make test-hosts`.
"""
