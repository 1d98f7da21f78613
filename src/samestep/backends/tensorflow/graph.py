"""A traced function, computed with samestep's own threads and noise, on variables that live for one computation.

TensorFlow divides one operation among a pool of threads, and the bits depend on the size of that pool: those of a product of
matrices, of a convolution's gradient, of a sum, with oneDNN and without. The pool of a process is made when TensorFlow starts
and cannot be changed afterwards. But a session can have a pool of its own. So tf.function traces, and a session computes.

The traced function has captured the model's variables. They are replaced by new ones, made and filled in every computation, so
threads do not see each other, and the user's variables are not written to. TensorFlow's graph optimizer is off: it folds
constants with all cores, and rounds differently when it knows the batch size (measured; it gained no time).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions

from samestep.backends.tensorflow.numerics import computes_as_everywhere
from samestep.errors import Invalid, NotDeterministic

v1 = tf.compat.v1
Tensor = Any
Compiled = Callable[..., Any]

# The name under which TensorFlow makes a new variable for every handle (ResourceHandle::ANONYMOUS_NAME), freed with it.
ANEW = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
SEEDS = ("seed_generator_state", "StateVar")  # the names of such variables: Keras's SeedGenerator, tf.random.Generator

# Operations that draw from a state of their own → the same draw from a seed, which is the second input, after the shape.
STATELESS = {"RandomUniform": "StatelessRandomUniform", "RandomUniformInt": "StatelessRandomUniformInt",
             "TruncatedNormal": "StatelessTruncatedNormal", "RandomStandardNormal": "StatelessRandomNormal"}  # fmt: skip
# Operations that start from an estimate of the CPU's, where Intel's is not AMD's → two that do without, where there are.
EXACT = {"Rsqrt": ("Sqrt", "RealDiv"), "Reciprocal": ("Identity", "RealDiv"), "Inv": ("Identity", "RealDiv"),
         "Erfc": ("Erf", "Sub"), "Softmax": ("LogSoftmax", "Exp")}  # fmt: skip
BY_CPU = {*EXACT, "Atan", "Atan2", "Erfinv", "Ndtri", "LRN", "LRNGrad"}


@dataclass(frozen=True)
class Piece:
    """Where the value of a variable lies: numbers [start, stop) of a vector."""

    variable: tf.Variable
    vector: int
    start: int
    stop: int


def compiled(traced: Any, vectors: Sequence[Any], pieces: Sequence[Piece], threads: int) -> Compiled:
    """A function of (*vectors, key, *arguments of the traced function), of NumPy arrays, which threads may call at once."""
    definition = traced.graph.as_graph_def()
    drawing = draw_from_seeds(definition)
    if computes_as_everywhere():
        replace_estimates(definition)
    count = len(traced.inputs) - len(traced.captured_inputs)
    graph, constants = tf.Graph(), {}
    with graph.as_default():
        held = [v1.placeholder(spec.dtype, spec.shape) for spec in vectors]
        key = v1.placeholder(tf.int64, (2,))
        given = [v1.placeholder(inner.dtype, inner.shape) for inner in traced.inputs[:count]]
        inputs = dict(zip([inner.name for inner in traced.inputs[:count]], given, strict=True))
        seeds = (tf.random.experimental.stateless_fold_in(key, tf.constant(i, tf.int64)) for i in range(1 << 30))
        inputs |= {f"{name}:0": next(seeds) for name in drawing}
        known = {id(piece.variable.handle): piece for piece in pieces}
        others = {id(variable.handle): variable for variable in traced.graph.variables}
        for inner, outer in zip(traced.inputs[count:], traced.captured_inputs, strict=True):
            if id(outer) in known:
                piece = known[id(outer)]
                value = held[piece.vector][piece.start : piece.stop]
                inputs[inner.name] = variable_of(piece.variable, value)
            elif inner.dtype not in (tf.resource, tf.variant):
                constants[v1.placeholder(inner.dtype, inner.shape)] = outer.numpy()
                inputs[inner.name] = next(reversed(constants))
            elif is_seed(others.get(id(outer))):
                variable = others[id(outer)]
                seed = tf.cast(next(seeds), variable.dtype)
                inputs[inner.name] = variable_of(variable, tf.concat([seed, seed], 0)[: variable.shape.num_elements()])
            else:
                name = getattr(others.get(id(outer)), "name", inner.name)
                raise Invalid(
                    f"the model uses {name!r}, which is not among its variables, so its value could depend on who computed "
                    "which shard: keep it as an attribute of the model"
                )
        wanted = [output.name for output in traced.outputs] + [op.name for op in traced.graph.control_outputs]
        found = tf.import_graph_def(definition, input_map=inputs, return_elements=wanted, name="model")
        outputs = found[: len(traced.outputs)]
        with tf.control_dependencies(found[len(traced.outputs) :]):  # what prints or asserts
            outputs = [tf.identity(output) for output in outputs]
    call = callable_of(session(graph, threads), outputs, [*held, key, *given, *constants])
    fixed = list(constants.values())
    return lambda *arrays: call(*arrays, *fixed)


def variable_of(like: tf.Variable, value: Tensor) -> Tensor:
    """The handle of a new variable; the value is written before anyone can read it."""
    handle = tf.raw_ops.VarHandleOp(dtype=like.dtype, shape=like.shape, shared_name=ANEW)
    filled = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.reshape(value, like.shape))
    with tf.control_dependencies([filled]):
        return tf.identity(handle)


def is_seed(variable: tf.Variable | None) -> bool:
    """Whether it is the state of a Keras seed generator or of a tf.random.Generator."""
    return variable is not None and variable.name.rpartition("/")[2].startswith(SEEDS)


def draw_from_seeds(definition: Any) -> list[str]:
    """Make every random operation draw from a seed that is passed in. Returns the names of the seeds' placeholders."""
    names: list[str] = []
    for node in list(definition.node):
        if node.op in STATELESS:
            name = f"samestep_seed_{len(names)}"
            names.append(name)
            seed = definition.node.add(name=name, op="Placeholder")
            seed.attr["dtype"].type = tf.int64.as_datatype_enum
            if "Tout" in node.attr:
                node.attr["dtype"].CopyFrom(node.attr["Tout"])
            node.attr["Tseed"].type = tf.int64.as_datatype_enum
            for old in ("seed", "seed2", "Tout"):
                node.attr.pop(old, None)
            node.op = STATELESS[node.op]
            node.input[:1] = [node.input[0], name]
        else:
            refuse(node)
    for function in definition.library.function:
        for node in function.node_def:
            refuse(node)
    return names


def refuse(node: Any) -> None:
    if "seed2" in node.attr:
        raise NotDeterministic(
            f"{node.op} draws from a state of its own, and samestep cannot give it the shard's seed here: use keras.random, or "
            "tf.random.uniform, normal or truncated_normal outside of loops and inner functions"
        )


def replace_estimates(definition: Any) -> None:
    """For portable runs: 1 / sqrt(x), 1 / x, 1 - erf(x), exp(log(softmax(x))), each as more than one operation."""
    for node in [node for node in definition.node if node.op in EXACT]:
        first, node.op = EXACT[node.op]
        one, inner = (definition.node.add(name=f"{node.name}_{op}", op=op) for op in ("Const", first))
        one.attr["dtype"].CopyFrom(node.attr["T"])
        one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1, node.attr["T"].type))
        inner.attr["T"].CopyFrom(node.attr["T"])
        inner.input.append(node.input[0])
        node.input[:1] = [inner.name] if node.op == "Exp" else [one.name, inner.name]
    parts = [definition.node, *(function.node_def for function in definition.library.function)]
    for op in (node.op for part in parts for node in part):
        if op in BY_CPU or op.startswith("FusedBatchNorm"):
            raise Invalid(
                f"portable: {op}, as used here, gives other bits on other CPUs: compute it from other operations"
            )


def callable_of(within: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Compiled:
    """A function of arrays in a session. Measured: a call costs 5 µs; of Session.run, 140, most of it under Python's lock."""
    names = [[tensor.name for tensor in tensors] for tensors in (inputs, outputs)]
    call: Compiled = within._make_callable_from_options(CallableOptions(feed=names[0], fetch=names[1]))
    return call


def session(graph: tf.Graph, threads: int) -> Any:
    """A session that computes in the thread that calls it, an operation with a fixed number of threads.

    So the shards of a step are not branches of one graph: threads of TensorFlow's, which would compute these side by side, make
    zeros of denormal numbers, which the thread that calls keeps.
    """
    config = v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=-1)
    config.device_count["GPU"] = 0
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    return v1.Session(graph=graph, config=config)


@functools.cache
def own_threads() -> bool:
    """Whether sessions have pools of their own. Measured: if so, one thread and two sum in different orders."""
    array = np.random.Generator(np.random.Philox(key=0)).standard_normal((1 << 16, 16), np.float32)
    with tf.Graph().as_default() as graph:
        given = v1.placeholder(tf.float32, array.shape)
        total = tf.raw_ops.BiasAddGrad(out_backprop=given)
    one, two = (session(graph, threads).run(total, {given: array}) for threads in (1, 2))
    return bool((one != two).any())
