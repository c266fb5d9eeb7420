#!/usr/bin/env python3
"""Pack the first 100 CIFAR-10 test images of each class into the sheet inside the package, losslessly.

python examples/pack_cifar10_test.py DATA src/maskaq/zoo/cifar10_test_1000.png

DATA is what examples/train_cifar10.py takes. Ten rows of classes, 100 images across: `maskaq.zoo.test_images` reads it.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from train_cifar10 import load_cifar10

_, test = load_cifar10(Path(sys.argv[1]))
images, labels = np.asarray(test.images), np.asarray(test.labels)
rows = np.stack([images[labels == label][:100] for label in range(10)])  # (10, 100, 32, 32, 3)
Image.fromarray(rows.transpose(0, 2, 1, 3, 4).reshape(320, 3200, 3)).save(sys.argv[2], optimize=True)
