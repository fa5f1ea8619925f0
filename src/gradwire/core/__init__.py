"""The words of all rooms: specs and their registry, segments, payloads, requests to the group, keys of random bits."""
