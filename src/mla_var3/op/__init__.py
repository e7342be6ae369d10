"""The operations the kernels compute: sizes, inputs, references and costs, without any kernel."""
