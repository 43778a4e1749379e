"""Quantization-aware weights: what the forward uses is what the export will store.

Every forward rounds with the very operations, types and adapter merge of the export, so
expanding the exported codes gives the weights of the last forward bit for bit.
"""

from bisect import bisect
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.qat import SYMMETRIC_QUANTIZERS, QATConfig
from ...config.quant_spec import QuantSpec
from ...models.lora.lora_model import adapted_layers
from ..packing import expand
from .quantizers import QUANTIZERS
from .ste import straight_through


class FakeQuant:
    """The rounded weights of a model in training.

    Layers that are not trained are rounded at once, in the model, and stay so.

    Args:
        model: as loaded, in the types its checkpoint stores; its layers may carry LoRA
            adapters.
        specs: the grid of every rounded layer, by path.
        dtype: the type the export stores scales in.
        rounding: what is learned of the grids.
        packed: codes, scales and biases by path and name that the layers begin with;
            then the model's weights are what these stand for, in float32.

    Attributes:
        learned: the first scales and biases, float32 vectors, by path and name.
        made: paths of weights in the model that are made of others, which get their
            gradients through the grid; the model says that these weights are trained.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: dict[str, QuantSpec],
        dtype: mx.Dtype,
        rounding: QATConfig | None = None,
        packed: dict[str, dict[str, mx.array]] | None = None,
    ):
        self.dtype = dtype
        self.rounding = rounding or QATConfig()
        self._adapted = adapted_layers(model)
        self._types = {k: v.dtype for k, v in tree_flatten(model.parameters())}
        self._specs = specs
        widths = [*(phase.bits for phase in self.rounding.bit_schedule), 0]
        self._phases = [
            {path: self._grid(spec, least) for path, spec in specs.items()}
            for least in widths
        ]
        self._grids = self._phases[-1]
        # -1 = not rounded yet.
        self._phase = -1 if self.rounding.fake_quant_after_n_steps else 0
        modules = dict(model.named_modules())
        still = {path for path in specs if not self._is_trained(path, modules[path])}
        self._trained = [path for path in specs if path not in still]
        self.learned, self._still = {}, {}
        for path in specs:
            self._begin(path, modules[path], packed and packed[path])
        self.made = self._let_through(modules)

    def _begin(self, path: str, layer: nn.Module, packed: dict | None) -> None:
        grid, is_adapted = self._grids[path], path in self._adapted
        if path in self._trained:
            weight = layer.loaded if is_adapted else layer.weight
            first = self._phases[0][path]
            learned = grid.resume(packed) if packed else first.begin(weight)
            self.learned |= _named(path, learned)
            mx.eval(self.learned)
            return
        tensors = packed or grid.packed(layer.weight, grid.begin(layer.weight))
        layer.weight = expand(tensors, self._specs[path], self.dtype)
        self._still |= _named(path, tensors)
        mx.eval(self._still, layer.weight)

    def rates(self) -> dict[str, float]:
        """What the learning rate is multiplied by, by name, where it is not 1."""
        if self.rounding.scale_lr_multiplier == 1:
            return {}
        return dict.fromkeys(self.learned, self.rounding.scale_lr_multiplier)

    def reach(self, step: int, parameters: dict[str, mx.array]) -> bool:
        """Be ready for a step, counted from 0; grids begin where the weights are then.

        Args:
            parameters: get the first scales and biases of a phase, if this is its step.

        Returns:
            Whether the forward is another one now.
        """
        starts = self.rounding.phase_starts
        phase = bisect(starts, step) - 1
        if phase <= self._phase:
            return False
        self._phase = phase
        if step == starts[phase]:
            for path in self._trained:
                weight = self._merged(path, parameters)
                parameters |= _named(path, self._phases[phase][path].begin(weight))
        return True

    def served(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Trained weights as served, by path, straight-through to the masters.

        Every one passes through the type it has in the model. Where a grid is
        straight, an adapter's gradient does not come through here: `LoRALinear` takes
        it from the product, at the cost of plain LoRA.
        """
        weights = {}
        for name, value in parameters.items():
            if name not in self.learned:
                store = partial(mx.array.astype, dtype=self._types[name])
                weights[name] = straight_through(store)(value).astype(compute)
        for path in self._trained:
            weight = self._merged(path, parameters)
            if self._phase >= 0:
                learned = self._learned(path, parameters)
                weight = self._phases[self._phase][path].rounded(weight, learned)
            inner = ".linear" if path in self._adapted else ""
            weights[f"{path}{inner}.weight"] = weight.astype(compute)
        return weights

    def stored(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Codes, scales and biases of every rounded layer, as they are exported."""
        tensors = dict(self._still)
        for path in self._trained:
            weight, learned = (
                self._merged(path, parameters),
                self._learned(path, parameters),
            )
            tensors |= _named(path, self._grids[path].packed(weight, learned))
        return tensors

    def _grid(self, spec: QuantSpec, least: int = 0):
        """The grid of a layer in a phase of at least so many bits."""
        name = self.rounding.quantizer
        if spec.mode == "affine" and spec.bits < least:
            spec = spec.model_copy(update={"bits": least})
        # A model may ask for other bits in some layers, or for another mode.
        if name in SYMMETRIC_QUANTIZERS and spec.bits != 2:
            name = "lsq"
        if spec.mode != "affine":
            name = "minmax"
        return QUANTIZERS[name](spec, self.dtype, self.rounding.scale_init)

    def _is_trained(self, path: str, module: nn.Module) -> bool:
        if self.rounding.quantizer == "scales_only":
            return self._specs[path].mode == "affine"
        return path in self._adapted or "weight" in module.trainable_parameters()

    def _let_through(self, modules: dict[str, nn.Module]) -> set[str]:
        """Let gradients come to the weights of grids that change them."""
        made = set()
        # A layer that is kept from rounding adds its adapter itself.
        for path, layer in self._adapted.items():
            layer.merged = path in self._specs
        for path in self._trained:
            if self._grids[path].IS_STRAIGHT:
                continue
            layer, inner = modules[path], ""
            if path in self._adapted:
                layer.is_whole, layer, inner = True, layer.linear, ".linear"
            if "weight" not in layer.trainable_parameters():
                layer.unfreeze(keys=["weight"], recurse=False)
                made.add(f"{path}{inner}.weight")
        return made

    def _learned(
        self, path: str, parameters: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        names = ("scales", "biases")
        paths = {name: f"{path}.{name}" for name in names}
        return {k: parameters[v] for k, v in paths.items() if v in self.learned}

    def _merged(self, path: str, parameters: dict[str, mx.array]) -> mx.array | None:
        """The weight before rounding; None of codes that stay."""
        if path not in self._adapted:
            return parameters.get(f"{path}.weight")
        layer = self._adapted[path]
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINED}
        if not layer.is_whole:
            trained = {k: mx.stop_gradient(v) for k, v in trained.items()}
        return layer.merge(layer.loaded, trained)


def _named(path: str, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {f"{path}.{name}": value for name, value in tensors.items()}
