"""A call, checked: arguments, shapes, masks."""
