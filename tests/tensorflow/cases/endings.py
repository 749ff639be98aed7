"""Cases of what is refused, and of a worker that dies."""

import functools
import os
import time
import warnings

import keras
import numpy as np
import tensorflow as tf
from common import (
    NUM_SAMPLES,
    STRATEGY,
    TASK,
    Swing,
    balancer,
    case,
    compiled,
    custom,
    data,
    model,
)

from evenstep.exceptions import WorkerLostError
from evenstep.tensorflow import Balancer


@case
def refused():
    """What cannot be balanced says so, the same on every worker."""
    said = {}

    def trial(name, function):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function()
            said[name] = None
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    x, y = data()
    slices = tf.data.Dataset.from_tensor_slices
    made = balancer()
    for name, source in odd_sources(x, y).items():
        trial(name, lambda source=source: made.dataset(source))
    trial("shuffled pipeline", lambda: made.dataset(slices((x, y)), shuffle=True))
    trial("policy", lambda: balancer(policy="fastest"))
    trial("policy class", lambda: balancer(policy=Swing))
    trial("size", lambda: Balancer(STRATEGY, 2))
    trial("reduction", lambda: balancer(loss_reduction="max"))
    trial("strategy", lambda: Balancer("mirrored", 12))
    trial("strategy alone", lambda: Balancer(tf.distribute.get_strategy(), 12))
    trial("no model", lambda: made.prepare(len))
    trial("no optimizer", lambda: made.prepare(model(), "sgd"))
    trial("state", lambda: made.load_state_dict({"format": "other"}))
    trial("clipping", lambda: made.prepare(model(), keras.optimizers.SGD(clipnorm=1.0)))
    trial("batch norm", lambda: made.prepare(of(keras.layers.BatchNormalization)))
    trial("activity", lambda: made.prepare(of(keras.layers.Dense, 1, activity_regularizer="l2")))
    outside = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trial("outside", lambda: made.prepare(outside))
    trial("one behind the other", chained)
    trial("one behind the other, inside", lambda: chained(inside=True))
    trial("detached", lambda: chained(tf.stop_gradient))
    trial("of its shape", lambda: chained(lambda made: tf.random.normal(tf.shape(made))))
    trial("unlike", unlike)
    trial("twice", lambda: made.prepare(made.prepare(compiled())))
    for name, options in {
        "eager": {"run_eagerly": True},
        "jit": {"jit_compile": True},
        "several steps": {"steps_per_execution": 4},
        "sum": {"loss": keras.losses.MeanSquaredError(reduction="sum")},
    }.items():
        odd = made.prepare(compiled(**options))
        trial(name, lambda odd=odd: odd.fit(x, y, verbose=0))
    for name, (given, options) in odd_fits(x, y).items():
        trial(name, functools.partial(balanced_fit_on, *given, **options))
    for name, function in {
        "nested": nested,
        "masked": masked,
        "fixed size": fixed_size,
        "evaluated": evaluated_on_training_data,
        "on a batch": on_a_batch,
    }.items():
        trial(name, function)
    return said


def odd_sources(x, y):
    """What is no data set of single samples, as many for every epoch, of one shape."""
    slices = tf.data.Dataset.from_tensor_slices
    return {
        "batched": slices((x, y)).batch(4),
        "batched, prefetched": slices((x, y)).batch(4).prefetch(2),
        "endless": slices((x, y)).repeat(),
        "unknown": slices((x, y)).filter(lambda *_: True),
        "ragged": slices(tf.RaggedTensor.from_row_lengths(y, [100, 22])),
        "sparse": slices(tf.sparse.from_dense(x)),
        "rows": (x, y[:5]),
        "none": 7,
    }


def odd_fits(x, y):
    """What `fit` cannot be given where a balancer has other data."""
    return {
        "plain data": ([tf.data.Dataset.from_tensor_slices((x, y)).batch(12)], {}),
        "plain data, iterator": ([iter([(x, y)])], {}),
        "another batch size": ([x, y], {"batch_size": 6}),
        "other arrays": ([x, y], {}),
        "split": ([x, y], {"validation_split": 0.999}),
    }


def evaluated_on_training_data():
    """The balancer's own data, to judge by."""
    with balancer() as made:
        trained = made.prepare(compiled())
        dataset = made.dataset(data())
        trained.fit(dataset, shuffle=False, verbose=0, validation_data=dataset)


def on_a_batch():
    """A step on a batch of the script's own."""
    with balancer() as made:
        made.prepare(compiled()).train_on_batch(*data(12))


def balanced_fit_on(*given, **options):
    with balancer() as made:
        trained = made.prepare(compiled())
        made.dataset(data())
        trained.fit(*given, shuffle=False, verbose=0, **options)


class Masked(keras.Model):
    """Has a mask on its output that is made after its `call`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.supports_masking = True

    def call(self, x):
        return self.dense(x[..., None])

    def compute_mask(self, x, mask=None):
        return x > 0


def masked():
    """A loss that would be a mean over what each worker left unmasked."""
    with STRATEGY.scope():
        trained = Masked()
        trained.compile("sgd", "mse")
    with balancer() as made:
        x, _ = data()
        made.prepare(trained).fit(made.dataset((x, x[..., None])), shuffle=False, verbose=0)


def of(layer, *args, **options):
    """A model of one layer, made as it should be."""
    with STRATEGY.scope():
        return keras.Sequential([keras.Input((4,)), layer(*args, **options)])


def nested():
    """A prepared model within a prepared one."""
    inner = of(keras.layers.Dense, 4)
    with STRATEGY.scope():
        outer = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])
    made = balancer()
    made.prepare(inner)
    made.prepare(outer)(tf.zeros((3, 4), tf.float64), training=True)


def chained(between=lambda tensor: tensor, *, inside=False):
    """A critic behind a generator, something between them, both prepared."""
    made = balancer()
    first, second = made.prepare(of(keras.layers.Dense, 4)), made.prepare(of(keras.layers.Dense, 1))

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float64)])
    def forward(x):
        made = between(2 * first(x, training=True))
        judge = tf.function(lambda: second(made, training=True))
        return judge() if inside else second(made, training=True)

    forward.get_concrete_function()


def unlike():
    """Another order on every worker."""
    with balancer() as made:
        iter(made.dataset(data(), shuffle=True, seed=TASK)).get_next()


def fixed_size():
    """A function that is traced for the size of one batch."""
    trained = balancer().prepare(model())
    tf.function(lambda x: trained(x, training=True))(tf.zeros((5, 4), tf.float64))


def shuffled(seed=3):
    return tf.data.Dataset.from_tensor_slices(data()).shuffle(NUM_SAMPLES, seed=seed)


def fitted(source, **options):
    """How many epochs of three a fit gets through, and the error that ends it."""
    ended = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch))
    made = balancer()
    trained = made.prepare(compiled())
    try:
        dataset = made.dataset(source, **options)
        trained.fit(dataset, epochs=3, shuffle=False, verbose=0, callbacks=[watch])
    except ValueError as error:
        return {"epochs": len(ended), "said": str(error)}
    finally:
        made.close()
    return {"epochs": len(ended), "said": None}


@case
def drift():
    """Pipelines of which one worker reads another order, or other samples; and fine ones."""
    peeked, in_a_loop = shuffled(), shuffled()
    for rows in (peeked, in_a_loop):
        if TASK == 0:
            next(iter(rows))
    later = shuffled()
    noise = np.random.default_rng()  # of its own on every worker

    def source(epoch):
        if epoch == 1 and TASK == 2:
            next(iter(later))
        return later

    def augment(x, y):
        drawn = tf.numpy_function(lambda: noise.normal(size=4), [], tf.float64)
        return x + tf.ensure_shape(drawn, x.shape), y

    found = {
        "peeked": fitted(peeked),
        "peeked, without the remainder": fitted(peeked, drop_remainder=True),
        "peeked later": fitted(source),
        "sharded": fitted(tf.data.Dataset.from_tensor_slices(data(3 * NUM_SAMPLES)).shard(3, TASK)),
        "peeked, augmented": fitted(peeked.map(augment)),
        "augmented": fitted(shuffled().map(augment), drop_remainder=True),
        "alike": fitted(shuffled()),
    }
    try:
        custom(balancer(), [], num_epochs=2, source=in_a_loop)
    except ValueError as error:
        found["loop"] = {"epochs": 0, "said": str(error)}
    return found


class Die(keras.callbacks.Callback):
    """Worker 2 is gone after its third batch."""

    def on_train_batch_end(self, batch, logs=None):
        if TASK == 2 and batch == 3:
            os._exit(9)


@case
def killed():
    """One is killed in the middle of a fit; comes last."""
    made = balancer()
    trained = made.prepare(compiled())
    dataset = made.dataset(data())
    began_s = time.monotonic()
    try:
        trained.fit(dataset, epochs=50, shuffle=False, verbose=0, callbacks=[Die()])
    except WorkerLostError as error:
        return {"rank": error.rank, "said": str(error), "after_s": time.monotonic() - began_s}
    finally:
        made.close()
    return {"rank": None}
