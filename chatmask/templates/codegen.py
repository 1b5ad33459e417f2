"""Python code for a chat template: as Jinja's sandbox writes it, with the usual look-ups in line.

Jinja compiles `message.role` to a call of the sandbox, which tries the attribute, then the item, and checks what it found. Nearly
always the object is a plain dictionary and the name is none of its methods; then the answer can only be the item, and there is
nothing to check (the sandbox never checks items). The code written here asks for exactly that case first, exact type for exact
type, and leaves all others to the sandbox. So it is as safe as the sandbox, and gives what the sandbox gives.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst

DICT_ATTRIBUTES = frozenset(dir(dict))
SAFE_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
SAFE_STRING_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
LOOP_ATTRIBUTES = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})


class InlineLookups(CodeGenerator):
    """Writes items of dictionaries and lists, loop attributes and string methods in line.

    `reports` names functions of chatmask's own that are called directly; templates cannot name them (see `tracing.py`).
    """

    reports: frozenset[str] = frozenset()

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """`x.name`: the item of a dictionary, or an attribute of the loop."""
        name = node.attr
        if name not in DICT_ATTRIBUTES:
            value = self.temporary_identifier()
            self.write(
                f"(({value}[{name!r}] if {name!r} in {value} else undefined(obj={value}, name={name!r})) if type({value} := "
            )
            self.visit(node.node, frame)
            self.write(") is dict else ")
            if name in LOOP_ATTRIBUTES and isinstance(node.node, nodes.Name) and node.node.name == "loop":
                self.write(f"{value}.{name} if type({value}) is LoopContext else ")
            self.write(f"environment.getattr({value}, {name!r}))")
        else:
            super().visit_Getattr(node, frame)

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """`x['name']` of a dictionary."""
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            value, key = self.temporary_identifier(), repr(node.arg.value)
            self.write(f"({value}[{key}] if type({value} := ")
            self.visit(node.node, frame)
            self.write(f") is dict and {key} in {value} else environment.getitem({value}, {key}))")
        else:
            super().visit_Getitem(node, frame)

    @optimizeconst
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """`x.strip('...')` of a string, and chatmask's own reports."""
        plain = not (forward_caller or node.kwargs or node.dyn_args or node.dyn_kwargs)
        function = node.node
        if plain and isinstance(function, nodes.Name) and function.name in self.reports:
            self.write(frame.symbols.ref(function.name) + "(")
            self._arguments(node, frame)
            self.write(")")
        elif (
            plain
            and isinstance(function, nodes.Getattr)
            and function.attr in SAFE_STRING_METHODS - DICT_ATTRIBUTES
            and all(isinstance(argument, nodes.Const) for argument in node.args)
        ):
            value = self.temporary_identifier()
            self.write(f"({value}.{function.attr}(")
            self._arguments(node, frame)
            self.write(f") if type({value} := ")
            self.visit(function.node, frame)
            # as jinja2 writes a call in the sandbox, with the object named instead of written out
            scope = "".join(
                f", {name}={name}"
                for name, given in (("_loop_vars", frame.loop_frame), ("_block_vars", frame.block_frame))
                if given
            )
            self.write(f") is str else environment.call(context, environment.getattr({value}, {function.attr!r})")
            self.signature(node, frame)
            self.write(f"{scope}))")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def _arguments(self, node: nodes.Call, frame: Frame) -> None:
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
