"""Devices that compute by one kernel text: its drivers, and a whole stage on one of them."""
