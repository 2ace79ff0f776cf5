"""Explains what was measured: who waited for whom, what was moved how fast, and who is slow.

`cell_analysis` hears a cell's records and keeps what follows from them, as the plain values of
`values`; board, tracking and the cell's last words read those.
"""
