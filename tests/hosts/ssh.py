"""Keys and settings of ssh, made anew for each bed: one user key, one key per host."""

from collections.abc import Mapping
from pathlib import Path

from tests.hosts.commands import call

# As on Debian, but for accounts: there is only root here, and it has no password.
_SSHD_CONFIG = """\
Port 22
ListenAddress 0.0.0.0
HostKey {host_key}
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
SetEnv {environment}
Subsystem sftp internal-sftp
LogLevel VERBOSE
"""


def make_keys(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write a user's key pair (`id_ed25519`), the hosts' keys, and their `known_hosts`."""
    _make_key(folder / "id_ed25519")
    lines = []
    for name, address in addresses.items():
        _make_key(_host_key(folder, name))
        public = _host_key(folder, name).with_suffix(".pub").read_text().split()
        lines.append(f"{name},{address} {public[0]} {public[1]}\n")
    (folder / "known_hosts").write_text("".join(lines))


def write_client(folder: Path, keys: Path) -> None:
    """Write what a host's ~/.ssh holds: its user may go to every host, and may come from each."""
    folder.mkdir(mode=0o700)
    files = {
        "id_ed25519": (keys / "id_ed25519").read_text(),
        "authorized_keys": (keys / "id_ed25519.pub").read_text(),
        "known_hosts": (keys / "known_hosts").read_text(),
        "config": "Host *\n  IdentityFile ~/.ssh/id_ed25519\n  ConnectTimeout 5\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)


def write_server(path: Path, keys: Path, name: str, environment: Mapping[str, str]) -> None:
    """Write the sshd_config of a host; `environment` is what each of its logins has."""
    words = " ".join(f'"{key}={value}"' for key, value in environment.items())
    path.write_text(_SSHD_CONFIG.format(host_key=_host_key(keys, name), environment=words))


def _host_key(folder: Path, name: str) -> Path:
    return folder / f"{name}_host_key"


def _make_key(path: Path) -> None:
    call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])
