"""The statements of other libraries, on top of this one's trainer."""
