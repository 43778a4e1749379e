"""llama.cpp's contexts with hidden states in and out, through llama-cpp-python."""

import ctypes

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext

ENCODE, DECODE = 0, 1
FLOATS = ctypes.POINTER(ctypes.c_float)


def _extension(name, result, *arguments):
    """A function of llama-ext.h, which the package does not wrap."""
    library = llama_cpp_ext.llama_cpp._lib
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


def _layer_input():
    prefix, context = "_Z30llama_{}_embeddings_layer_inp", ctypes.c_void_p
    setter = _extension(
        prefix.format("set") + "P13llama_contextjb",
        None,
        *(context, ctypes.c_uint32, ctypes.c_bool),
    )
    getter = _extension(
        prefix.format("get") + "P13llama_contextj", FLOATS, context, ctypes.c_uint32
    )
    return setter, getter


class Context:
    """A file with a context of 64 positions, all of it in 32 bits.

    Args:
        other: the context of the target, with whose tensors a drafter computes.
    """

    def __init__(self, file, other=None):
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {file}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 64
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.ctx_other = other and other.context
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.width = llama_cpp.llama_model_n_embd(self.model)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def metadata(self, key):
        """The value of a key, as text."""
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_model_meta_val_str(
            self.model, key.encode(), buffer, len(buffer)
        )
        assert size >= 0, key
        return buffer.value.decode()

    def target_layers(self):
        """The numbers of the states that a drafter reads."""
        pointer = ctypes.POINTER(ctypes.c_int32)
        name = "_Z28llama_model_target_layer_idsPK11llama_model"
        ids = _extension(name, pointer, ctypes.c_void_p)(self.model)
        name = "_Z30llama_model_target_layer_ids_nPK11llama_model"
        count = _extension(name, ctypes.c_uint32, ctypes.c_void_p)(self.model)
        return ids[:count]

    def process(self, kind, positions, *, tokens=None, states=None):
        """Run a batch; all of its rows have outputs."""
        batch = llama_cpp.llama_batch_ext_init(self.context)
        for row, position in enumerate(positions):
            if tokens is None:
                embedding = _embedding(states[row])
                index = llama_cpp.llama_batch_ext_add_embd(batch, 0, embedding)
            else:
                index = llama_cpp.llama_batch_ext_add_token(batch, 0, tokens[row])
                if states is not None:
                    embedding = _embedding(states[row])
                    assert llama_cpp.llama_batch_ext_set_embd_token(
                        batch, index, embedding
                    )
            assert index == row
            place = ctypes.c_int32(position)
            assert llama_cpp.llama_batch_ext_set_pos(batch, index, ctypes.byref(place))
            llama_cpp.llama_batch_ext_set_output_logits(batch, index, True)
        assert llama_cpp.llama_process(self.context, kind, batch) == 0
        llama_cpp.llama_batch_ext_free(batch)

    def logits(self, count):
        """The logits [count, V] of the last batch."""
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.array(pointer[: count * self.num_tokens]).reshape(count, -1)

    def read_layers(self, layers, tokens):
        """The states [L, n * width] with these numbers, of a text from position 0."""
        setter, getter = _layer_input()
        for layer in layers:
            setter(self.context, layer, True)
        self.process(DECODE, range(len(tokens)), tokens=tokens)
        size = len(tokens) * self.width
        states = [getter(self.context, layer)[:size] for layer in layers]
        return np.concatenate(np.array(states).reshape(len(layers), -1, self.width), 1)

    def keep_hidden(self):
        """Keep the outputs for `hidden`."""
        llama_cpp_ext.llama_set_embeddings_nextn(self.context, True, True)

    def hidden(self, count):
        """The last layer's outputs [count, width] of the last batch."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.context)
        return np.array(pointer[: count * self.width]).reshape(count, -1)


def _embedding(row):
    data = np.ascontiguousarray(row, np.float32)
    pointer = data.ctypes.data_as(FLOATS)
    embedding = llama_cpp.llama_embd(pointer, 1, data.size)
    embedding.owner = data
    return embedding
