"""The attention nodes as TensorRT plugins, of classic TensorRT and of TensorRT-RTX alike.

    register(trt)     before a graph is parsed, and before an engine that contains them is deserialized

A plugin is found by name, version and namespace, so the version is the ABI: it is raised whenever inputs, their order
or their meaning change, and TensorRT refuses an engine of another version. There are no attributes: the shapes say
everything. `enqueue` launches the kernels of `launch.py` on TensorRT's stream, so a CUDA graph captures them.
"""

from __future__ import annotations

from typing import Any

from d2sd.plugins.cascade_attention.onnx import DOMAIN, INPUTS, TREE, VERSION

_INTEGERS = {"page_table", "context_len", "attn_mask", "new_len", "first"}


def register(trt: Any) -> None:
    """Register the plugins with this TensorRT's registry, once a process."""
    registry = trt.get_plugin_registry()
    if registry.get_creator(TREE, VERSION, DOMAIN) is not None:
        return
    for name in INPUTS:
        creator = _creator(trt, name)
        _KEPT.append(creator)  # the registry holds no reference
        if not registry.register_creator(creator, DOMAIN):
            raise AssertionError(f"TensorRT did not take the plugin {name}")


_KEPT: list[Any] = []


def _creator(trt: Any, name: str) -> Any:
    plugin = _plugin(trt, name)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = name, VERSION, DOMAIN
            self.field_names = trt.PluginFieldCollection([])

        def create_plugin(self, layer: str, fields: Any, phase: Any) -> Any:
            del layer, fields
            return plugin(phase)

    return Creator()


def _plugin(trt: Any, name: str) -> type[Any]:
    inputs = INPUTS[name]

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        def __init__(self, phase: Any) -> None:
            for base in Plugin.__bases__:
                base.__init__(self)
            self._phase = phase
            self.plugin_name, self.plugin_version, self.plugin_namespace = name, VERSION, DOMAIN
            self.num_outputs = 1

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self._phase)

        # -- building --------------------------------------------------------------------------------------------------

        def get_output_data_types(self, types: list[Any]) -> list[Any]:
            return [types[0]]

        def get_output_shapes(self, shapes: list[Any], shape_inputs: list[Any], exprs: Any) -> list[Any]:
            out = trt.DimsExprs(4)
            for axis in range(4):
                out[axis] = shapes[0][axis]
            return [out]

        def supports_format_combination(self, place: int, descriptions: list[Any], count: int) -> bool:
            """Everything row-major; integers are int32, all others have q's type."""
            described = descriptions[place].desc
            if described.format != trt.TensorFormat.LINEAR:
                return False
            if place < count and inputs[place] in _INTEGERS:
                return bool(described.type == trt.DataType.INT32)
            q_type = descriptions[0].desc.type
            if place == 0:
                return described.type in (trt.DataType.HALF, trt.DataType.BF16, trt.DataType.FLOAT)
            return bool(described.type == q_type)

        def configure_plugin(self, inputs: list[Any], out: list[Any]) -> None:
            del inputs, out

        def get_workspace_size(self, inputs: list[Any], out: list[Any]) -> int:
            return 0  # partial results of a split context are in PyTorch's allocator, which a CUDA graph captures too

        def get_valid_tactics(self) -> list[int]:
            return []

        # -- running ---------------------------------------------------------------------------------------------------

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection([])

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def set_tactic(self, tactic: int) -> None:
            del tactic

        def on_shape_change(self, inputs: list[Any], out: list[Any]) -> None:
            del inputs, out

        def enqueue(
            self,
            specs: list[Any],
            outputs: list[Any],
            inputs_at: list[int],
            outputs_at: list[int],
            workspace: int,
            stream: int,
        ) -> None:
            from d2sd.plugins.cascade_attention.tensorrt.enqueue import run

            del outputs, workspace
            if self._phase == trt.TensorRTPhase.BUILD:
                return  # the builder times layers on random inputs, and random page tables point out of bounds
            run(
                name, [(tuple(d.dims), str(d.type).rpartition(".")[2]) for d in specs], inputs_at, outputs_at[0], stream
            )

    return Plugin
