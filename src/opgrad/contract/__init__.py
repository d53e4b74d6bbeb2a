"""The contract: an operator's declaration, the checks that follow from it, a call's signature.

Imports no other room.
"""

from opgrad.contract.attributes import REDUCTIONS as REDUCTIONS
from opgrad.contract.attributes import Axes as Axes
from opgrad.contract.attributes import Axis as Axis
from opgrad.contract.attributes import FloatDtypes as FloatDtypes
from opgrad.contract.attributes import Reduction as Reduction
from opgrad.contract.attributes import Sizes as Sizes
from opgrad.contract.attributes import check_of as check_of
from opgrad.contract.attributes import divisor as divisor
from opgrad.contract.attributes import finite as finite
from opgrad.contract.attributes import flag as flag
from opgrad.contract.attributes import integer as integer
from opgrad.contract.attributes import integers as integers
from opgrad.contract.attributes import number as number
from opgrad.contract.attributes import one_of as one_of
from opgrad.contract.attributes import shown as shown
from opgrad.contract.checks import check_arrays as check_arrays
from opgrad.contract.checks import normalise as normalise
from opgrad.contract.declaration import IN_GRAPHS as IN_GRAPHS
from opgrad.contract.declaration import IN_LOSSES as IN_LOSSES
from opgrad.contract.declaration import ON_CPU as ON_CPU
from opgrad.contract.declaration import ON_SHARDS as ON_SHARDS
from opgrad.contract.declaration import General as General
from opgrad.contract.declaration import OnnxName as OnnxName
from opgrad.contract.declaration import Operator as Operator
from opgrad.contract.declaration import Tensor as Tensor
from opgrad.contract.declaration import graph_operators as graph_operators
from opgrad.contract.declaration import like as like
from opgrad.contract.declaration import loss_operators as loss_operators
from opgrad.contract.declaration import operator as operator
from opgrad.contract.declaration import operators as operators
from opgrad.contract.declaration import public_operators as public_operators
from opgrad.contract.declaration import reference as reference
from opgrad.contract.declaration import shaped_like as shaped_like
from opgrad.contract.declaration import tensor_operators as tensor_operators
from opgrad.contract.dtypes import BYTES as BYTES
from opgrad.contract.dtypes import DTYPES as DTYPES
from opgrad.contract.dtypes import FLOAT8 as FLOAT8
from opgrad.contract.dtypes import FLOATS as FLOATS
from opgrad.contract.dtypes import INTEGERS as INTEGERS
from opgrad.contract.dtypes import Array as Array
from opgrad.contract.dtypes import Attributes as Attributes
from opgrad.contract.dtypes import Shape as Shape
from opgrad.contract.dtypes import Shapes as Shapes
from opgrad.contract.dtypes import Spec as Spec
from opgrad.contract.lists import NEEDS as NEEDS
from opgrad.contract.lists import choosing as choosing
from opgrad.contract.lists import only as only
from opgrad.contract.lists import several as several
from opgrad.contract.lists import spread as spread
