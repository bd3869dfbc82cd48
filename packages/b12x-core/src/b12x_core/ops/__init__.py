"""The ops: arguments checked, custom ops registered with torch, calls dispatched to what serves them."""
