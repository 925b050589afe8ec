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
{{- $_ := set $config "model" $target -}}
{{- range $peer := without (include "canopy.services" .root | fromJsonArray) "router" -}}
{{- $_ := set $config $peer (include "canopy.replicas" (dict "root" $.root "name" $peer) | fromJsonArray) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $config "platform" $slice.platform -}}
{{- $_ := set $config "chip" $slice.chip -}}
{{- $_ := set $config "compile_cache" "/var/cache/canopy" -}}
{{- end -}}
{{- if eq .name "verify" -}}
{{- $_ := set $config "model" $target -}}
{{- if $slice.chipsPerHost }}{{ $_ := set $config "tensor_parallel" (int $slice.chipsPerHost) }}{{ end -}}
{{- if $values.draft.enabled }}{{ $_ := set $config "head" $head }}{{ end -}}
{{- end -}}
{{- if eq .name "draft" -}}
{{- $_ := set $config "head" $head -}}
{{- $_ := set $config "target" $target -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy $own.config) | toYaml -}}
{{- end -}}

{{- /* Addresses of every pod that may be called, as JSON: their names are stable. A replica that an
       autoscaler has not started is an address that does not answer. */ -}}
{{- define "canopy.replicas" -}}
{{- $own := get .root.Values .name -}}
{{- $name := include "canopy.serviceName" . -}}
{{- $most := ternary $own.replicas $own.autoscaling.maxReplicas (eq $own.autoscaling.kind "none") -}}
{{- $addresses := list -}}
{{- range $index := until (int $most) -}}
{{- $pod := printf "%s-%d.%s.%s.svc" $name $index $name $.root.Release.Namespace -}}
{{- $addresses = append $addresses (printf "%s:%s" $pod (include "canopy.port" $)) -}}
{{- end -}}
{{- toJson $addresses -}}
{{- end -}}

{{- define "canopy.address" -}}
{{ include "canopy.serviceName" . }}.{{ .root.Release.Namespace }}.svc:{{ include "canopy.port" . }}
{{- end -}}
