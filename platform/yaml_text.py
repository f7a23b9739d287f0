"""The one reader of YAML: `yaml.safe_load`, and a key that stands twice in one mapping is an
error.
"""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the last of two equal keys win without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping",
                    node.start_mark,
                    f"the key {key.value!r} stands twice",
                    key.start_mark,
                )
            seen.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML, or a mapping has a key twice; with its line. PyYAML raises
            other errors for dates that there are not, and numbers and brackets without end.
    """
    return yaml.load(text, Loader=_Loader)


__all__ = ["load_yaml"]
