"""The HTML of the benchmark page, as a jinja2 template.

It is a string in a module, so that the package needs no data file for it. Nothing in it refers to
another file or address.
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root {
  --back: #ffffff; --text: #1b1f24; --dim: #5b6570; --line: #d8dee4; --soft: #f4f6f8;
  --ours: #0072b2; --rival: #8a939c; --good: #1a7f37; --bad: #b3261e; --warn: #7a4d00;
  --warn-back: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14181d; --text: #e4e8ec; --dim: #9aa5b1; --line: #333c46; --soft: #1c2229;
    --ours: #56b4e9; --rival: #77818c; --good: #57c26e; --bad: #ff8a80; --warn: #ffd58a;
    --warn-back: #3a2d10;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; }
.dim { color: var(--dim); }
.note { background: var(--warn-back); color: var(--warn); padding: .7rem 1rem; border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--soft); font-weight: 600; white-space: nowrap; }
.figures td + td, .figures th + th { text-align: right; font-variant-numeric: tabular-nums; }
.figures td { white-space: nowrap; }
.ours td:first-child { font-weight: 600; }
.projection td { color: var(--dim); }
.bar { height: 4px; margin-top: 3px; border-radius: 2px; background: var(--rival); }
.ours .bar { background: var(--ours); }
.better { color: var(--good); } .worse { color: var(--bad); font-weight: 600; }
figure { margin: 1.5rem 0; }
figure img {
  display: block; max-width: 100%; height: auto; padding: .5rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px;
}
figcaption { color: var(--dim); font-size: .92rem; margin-top: .4rem; }
code { font: .88rem ui-monospace, monospace; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for text in notes %}
<p class="note">{{ text }}</p>
{% endfor %}
<div class="scroll"><table>
<tbody>
{% for name, value in facts %}
<tr><th scope="row">{{ name }}</th><td>
{% if name == "command" %}<code>{{ value }}</code>{% else %}{{ value }}{% endif %}
</td></tr>
{% endfor %}
</tbody>
</table></div>
{% if regression is not none %}
<h2>Against the earlier record</h2>
<p>{{ regression.summary }}</p>
{% if verdicts %}
<div class="scroll"><table class="figures">
<thead><tr>{% for name in verdict_headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in verdicts %}
<tr class="{{ row[-1] }}">{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if regression.not_compared %}
<p class="dim">Not compared:</p>
<ul>
{% for row, why in regression.not_compared %}
<li>{{ row }}: {{ why }}</li>
{% endfor %}
</ul>
{% endif %}
{% for text in regression.remarks %}
<p class="dim">{{ text }}</p>
{% endfor %}
{% endif %}
{% if groups %}
<h2>Overview</h2>
<ul>
{% for group in groups %}
<li><a href="#shape-{{ loop.index }}">{{ group.title }}</a>
{% if group.headline %}: {{ group.headline }}{% endif %}
</li>
{% endfor %}
</ul>
{% endif %}
<h2>Plots</h2>
{% for plot in plots %}
{% if plot.data %}
<figure>
<img alt="{{ plot.title }}" src="data:image/png;base64,{{ plot.data }}">
<figcaption><strong>{{ plot.title }}.</strong> {{ plot.caption }}</figcaption>
</figure>
{% else %}
<p class="dim">{{ plot.title }}: not drawn, {{ plot.missing }}.</p>
{% endif %}
{% endfor %}
{% for group in groups %}
<h2 id="shape-{{ loop.index }}">{{ group.title }}</h2>
<p class="dim">{{ group.device }}. Compared {{ group.basis }}.</p>
{% if group.headline %}
<p>{{ group.headline }}.</p>
{% endif %}
<div class="scroll"><table class="figures">
<thead><tr>{% for name in headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in group.rows %}
<tr class="{{ row.source }}">
{% for cell in row.cells %}
<td>{{ cell }}{% if loop.first and row.share %}
<div class="bar" style="width: {{ '%.1f' % row.share }}%"></div>{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if doubts %}
<h2>To be explained</h2>
<ul>
{% for text in doubts %}
<li>{{ text }}</li>
{% endfor %}
</ul>
{% endif %}
{% if troubles %}
<h2>Not taking part</h2>
<div class="scroll"><table>
<thead><tr><th>kernel</th><th>status</th><th>reason</th></tr></thead>
<tbody>
{% for label, status, reason in troubles %}
<tr><td>{{ label }}</td><td>{{ status }}</td><td>{{ reason }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
<h2>{{ "How it was predicted" if predicted else "How it was measured" }}</h2>
<ul>
{% for text in method %}
<li>{{ text }}</li>
{% endfor %}
</ul>
</body>
</html>
"""
