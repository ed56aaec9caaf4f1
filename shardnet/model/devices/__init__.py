"""Devices that compute by one kernel text: a whole stage on one of them."""
