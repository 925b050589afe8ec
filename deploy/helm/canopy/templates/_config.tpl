{{- /* The settings file of one service: what the chart knows, then the values' `config`.
       Field names are those of the services' config.py; `make check-deploy` loads every rendered
       file through those classes. */ -}}
{{- define "canopy.config" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .name -}}
{{- $slice := include "canopy.slice" . | fromJson -}}
{{- $target := printf "%s/%s" $values.model.mountPath $values.model.target -}}
{{- $head := printf "%s/%s" $values.model.mountPath $values.model.head -}}
{{- $config := dict
  "host" "0.0.0.0"
  "port" (include "canopy.port" . | int)
  "metrics_port" (int $values.metricsPort)
  "drain_seconds" (int $own.drainSeconds)
  "log_format" $values.logFormat
-}}
{{- if eq .name "router" -}}
{{- $verify := dict "root" .root "name" "verify" -}}
{{- $draft := dict "root" .root "name" "draft" -}}
{{- $_ := set $config "model" $target -}}
{{- $_ := set $config "verify" (include "canopy.address" $verify) -}}
{{- $_ := set $config "draft" (ternary (include "canopy.address" $draft) "" $values.draft.enabled) -}}
{{- else -}}
{{- $_ := set $config "platform" $slice.platform -}}
{{- $_ := set $config "chip" $slice.chip -}}
{{- $_ := set $config "compile_cache" "/var/cache/canopy" -}}
{{- end -}}
{{- if eq .name "verify" -}}
{{- $_ := set $config "model" $target -}}
{{- if $values.draft.enabled }}{{ $_ := set $config "head" $head }}{{ end -}}
{{- end -}}
{{- if eq .name "draft" -}}
{{- $_ := set $config "head" $head -}}
{{- $_ := set $config "target" $target -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy $own.config) | toYaml -}}
{{- end -}}

{{- define "canopy.address" -}}
{{ include "canopy.serviceName" . }}.{{ .root.Release.Namespace }}.svc:{{ include "canopy.port" . }}
{{- end -}}
