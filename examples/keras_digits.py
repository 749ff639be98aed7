"""A small Keras CNN learns handwritten digits: in plain Keras, or balanced, as the name says.

Plain, start it alone: Keras 3 cannot `fit` on several workers. Balanced, start it on workers of
unlike speeds: `python examples/local_workers.py 3 examples/keras_digits.py`.
It needs `pip install -e ".[examples]"`, in a clone of evenstep.
"""

import time

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from evenstep.tensorflow import Balancer

SECONDS_PER_IMAGE = 0.0005


class Slowed(keras.layers.Layer):
    """Sleeps for every image, the less the faster the machine that it plays."""

    def __init__(self, speed):
        super().__init__()
        self.speed = speed

    def call(self, images):
        def sleep(images):
            time.sleep(SECONDS_PER_IMAGE * len(images) / self.speed)
            return images

        slept = tf.numpy_function(sleep, [images], images.dtype)
        slept.set_shape(images.shape)
        return slept


def main():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                Slowed(speed=2**rank),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    training = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    training = training.shuffle(1500, seed=0, reshuffle_each_iteration=False)
    balancer = Balancer(strategy, global_batch_size=60)
    model, training = balancer.prepare(model), balancer.dataset(training)
    callbacks = [balancer.callback()]
    model.fit(training, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)

    loss, accuracy = model.evaluate(images[1500:], labels[1500:], batch_size=99, verbose=0)
    if rank == 0:
        print(f"loss of the other 297 images: {loss:.4f}, {100 * accuracy:.1f} % right")


if __name__ == "__main__":
    main()
