"""A link that takes its time: carries Ethernet frames between two network cards, each one late.

Run as `python -I delay.py CARD CARD SECONDS` in the namespace of the cards; prints `ready`. It
stands for the kernel's netem, which not every kernel has. Frames keep their order, and none is lost
but when a card's own queue is full.
"""

import collections
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3  # linux/if_ether.h, ETH_P_ALL
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # linux/if_packet.h
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
# Larger than what TCP hands to a card in one piece, with its headers.
_FRAME_BYTES = 1 << 17


def main() -> None:
    """Carry frames until killed."""
    first, second = (_open(card) for card in sys.argv[1:3])
    delay_s = float(sys.argv[3])
    others = {first: second, second: first}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([first, second], [], [], timeout_s)
        for card in readable:
            waiting.append((time.monotonic() + delay_s, others[card], card.recv(_FRAME_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, card, frame = waiting.popleft()
            _send(card, frame)


def _open(card: str) -> socket.socket:
    """Open a card for whole frames, with what the kernel still means to do to them.

    Checksums are not computed yet, and pieces not yet cut to the size of a packet; the header that
    goes with each frame says so, and goes out again with it.
    """
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
    opened.bind((card, _ALL_PROTOCOLS))
    return opened


def _send(card: socket.socket, frame: bytes) -> None:
    try:
        card.send(frame)
    except OSError as error:  # a full queue loses frames, and so does a card that is down
        print(f"lost a frame of {len(frame)} bytes: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
